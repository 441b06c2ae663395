"""Sending a task: from a call and its options to a message in the broker."""
