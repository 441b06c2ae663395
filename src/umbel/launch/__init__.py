"""The composition root: finds the app, builds the worker. Both are unaware of each other."""
