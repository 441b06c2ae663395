"""Chance: random numbers for pauses and choices that must differ between nodes.

They come from the operating system. So a project that seeds Python's `random` gets the same numbers with
Umbel in its process as without, and forked processes draw different numbers.
"""

from random import SystemRandom

_system = SystemRandom()
random = _system.random
uniform = _system.uniform
choice = _system.choice
