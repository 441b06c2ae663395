"""The simulator: the workers' machines in a world of virtual time, chance and faults."""
