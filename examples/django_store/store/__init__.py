"""A store: orders come in by a view, and are packed by a task."""
