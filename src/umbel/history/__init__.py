"""What was recorded: kept in a lake, read from its tables."""
