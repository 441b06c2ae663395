"""Outbox: tasks that are sent in the caller's database transaction (`docs/outbox.md`).

Pure: `table.py` (the SQL statements, and the contents of a row). Shells: `block.py` writes rows in the
caller's transaction; `relay.py` publishes the committed rows; `database.py` has the address of the database
and the relay's connection.
"""
