"""Decisions. Pure: no IO, no clock, no randomness, no logging; time and chance come in as arguments."""
