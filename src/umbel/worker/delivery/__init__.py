"""A message inside the worker, from admission to settling."""
