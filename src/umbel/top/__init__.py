"""The terminal monitor: what a cluster does, as it happens."""
