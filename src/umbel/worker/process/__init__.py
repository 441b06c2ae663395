"""The worker as a process: logs, signals, shutdown, run directory, service manager."""
