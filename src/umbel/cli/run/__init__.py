"""Commands that run something on this machine."""
