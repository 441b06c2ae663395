"""Calls as values: signatures, chains, groups and chords."""
