"""Types: what the annotations of a task mean for its arguments and its result."""
