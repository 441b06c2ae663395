"""Outbox: tasks that are sent in the caller's database transaction (`docs/outbox.md`).

Pure: `table.py` (the SQL, and what a row holds). Shells: `block.py` writes, in the caller's transaction;
`database.py` (which database is meant, and the relay's connection to it) and `relay.py` publish what was
committed.
"""
