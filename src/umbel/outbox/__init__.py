"""Outbox: tasks that are sent in the caller's database transaction (`docs/outbox.md`).

Pure: `rows.py` (what a row holds), `dialects.py` (the SQL), `addresses.py` (which database is meant).
Shells: `block.py` and `connections.py` write, in the caller's transaction; `relay.py` and `database.py`
publish what was committed.
"""
