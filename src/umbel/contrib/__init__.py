"""Integrations with other libraries: a module for each, which imports it. Nothing else of Umbel imports
them.
"""
