"""Leases in a worker: holding, announcing and observing them, and listing them from the store."""
