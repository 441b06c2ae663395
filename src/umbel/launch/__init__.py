"""The composition root: finds the app and builds the worker, which do not know each other."""
