"""The embedded broker: one SQLite file, shared by the processes of one machine."""
