"""Events: their types, how nodes stamp them, and how receivers merge them. Pure."""
