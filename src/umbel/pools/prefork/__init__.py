"""Children from a fork server. Each runs one job at a time, so a crash or a memory leak affects one job."""
