"""Transforms: DataFrame in, DataFrame out, one file a table. No session, no action, no Python per row."""
