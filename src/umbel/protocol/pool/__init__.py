"""Decisions about a pool: which child runs what, when children start, stop and are replaced."""
