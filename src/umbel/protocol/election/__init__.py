"""Decisions about elections: which node performs an action that must run once, by the store or by Celery's
rules.
"""
