"""The pipeline: tables made from the lake by Spark, in one batch or as a stream."""
