"""The simulator: the workers' machines in a world of virtual time, random events and faults."""
