"""Real servers for tests: private, on free ports of the loopback, started and stopped by pid."""
