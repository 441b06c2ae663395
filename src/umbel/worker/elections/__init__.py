"""Elections in a worker: the shells around the machines, the calls of the store, users' handlers."""
