"""Shells that app and worker share: the driver of machines, the lease keeper."""
