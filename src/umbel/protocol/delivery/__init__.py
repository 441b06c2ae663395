"""Decisions about one message: run, delay, refuse, acknowledge."""
