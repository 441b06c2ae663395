"""The process that runs tasks."""
