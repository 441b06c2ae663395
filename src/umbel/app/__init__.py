"""What a user holds: the app, its tasks, signatures and results."""
