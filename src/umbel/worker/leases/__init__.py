"""Leases in a worker: who holds one, who is told, who hears the others, and what stands in the store."""
