"""Jobs: read, transform, write, publish."""
