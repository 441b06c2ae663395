"""The simulator: the machines that workers run, in a world of virtual time, chance and faults."""
