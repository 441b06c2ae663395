"""The bootsteps of a worker, one file each."""
