"""Remote control: what can be asked of a worker, and how it is asked."""
