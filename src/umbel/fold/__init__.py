"""Fold: compute tables from events, with Arrow and numpy. No files, no Spark.

`umbel.events.tables` defines the tables, `umbel.events` the rules. All events of a task must be folded
together, so the caller first divides events by task id (`buckets.py`).
"""
