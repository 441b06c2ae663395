"""Decisions of a leader: leases, the coordination store, the schedule, the recorder."""
