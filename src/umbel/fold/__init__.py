"""Fold: events become tables, by columns. Pure: Arrow tables in, Arrow tables out; no files, no Spark.

The tables are those of `umbel.events.tables`, the rules those of `umbel.events`. A task's events are
folded together, so the caller deals events out by task id first (`buckets.py`).
"""
