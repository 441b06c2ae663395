"""Umbel inside web frameworks: a module for each, which imports it. Nothing else of Umbel imports them."""
