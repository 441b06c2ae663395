"""The pipeline: builds tables from the lake, by Spark or local processes, in one batch or as a stream."""
