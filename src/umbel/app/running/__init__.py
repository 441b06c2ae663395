"""Running a task in a child: the tracer, the request, retries, follow-ups, progress."""
