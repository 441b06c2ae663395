"""The pipeline: build tables from the lake, with Spark or local processes, once or continuously.

This file has the errors of the pipeline, which commands catch without loading Spark. Each message is a
sentence for users; the command line maps the types to exit codes.
"""


class PipelineFault(Exception):
    """The base class of these errors. The message says what happened, to which value, and what to do."""


class NoJava(PipelineFault):
    """There is no Java runtime that Spark supports."""


class NoSpark(PipelineFault):
    """Spark cannot be started or reached."""


class BuildRuns(PipelineFault):
    """Another process is building in this lake."""


class NewerLake(PipelineFault):
    """A newer version of Umbel wrote the lake."""


class EmptyLake(PipelineFault):
    """The lake contains no events."""


class BuildFailed(PipelineFault):
    """The build failed; nothing was published."""


class JavaExited(BuildFailed):
    """Spark's Java exited during a build."""


class UnreadFile(BuildFailed):
    """A job cannot read the data of a file, although its metadata is readable."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path
