"""A shop on Django."""
