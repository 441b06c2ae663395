"""The pipeline: build tables from the lake, with Spark or local processes, once or continuously."""
