"""Code that users wrote for a worker: hooks, bootsteps, handlers; each guarded."""
