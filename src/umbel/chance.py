"""Random numbers for delays and choices that must differ between nodes.

They come from the operating system, for two reasons. A project that seeds Python's `random` gets the same
numbers with and without Umbel in its process. And forked processes draw different numbers.
"""

from random import SystemRandom

_system = SystemRandom()
random = _system.random
uniform = _system.uniform
choice = _system.choice
