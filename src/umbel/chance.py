"""Chance: for pauses and choices that must not be the same on every node.

Drawn from the operating system. A project that seeds Python's `random` gets the same numbers with Umbel
in its process as without, and forked processes do not draw alike.
"""

from random import SystemRandom

_system = SystemRandom()
random = _system.random
uniform = _system.uniform
choice = _system.choice
