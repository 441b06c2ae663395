"""Rows of the settings table, by subject."""
