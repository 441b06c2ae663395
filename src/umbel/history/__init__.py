"""History: recorded events, stored in a lake and read from its tables."""
