"""Celery's older message formats."""
