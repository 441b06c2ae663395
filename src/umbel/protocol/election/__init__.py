"""Decisions about an election: who does what must be done once."""
