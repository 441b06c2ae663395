"""Faults of the pipeline. The text of each is one clear sentence; the command turns them into exit codes."""


class PipelineFault(Exception):
    """The root of these faults. The text says what happened, to which value, and what to do about it."""


class NoJava(PipelineFault):
    """There is no Java that Spark can run on."""


class NoSpark(PipelineFault):
    """Spark could not be started or reached."""


class BuildRuns(PipelineFault):
    """Another process is building in this lake."""


class NewerLake(PipelineFault):
    """The lake was written by a newer version."""


class EmptyLake(PipelineFault):
    """There is nothing to build from."""


class BuildFailed(PipelineFault):
    """Spark could not finish; nothing was published."""


class JavaExited(BuildFailed):
    """Spark's Java exited during a build."""


class UnreadFile(BuildFailed):
    """A job could not read a file whose metadata was readable."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path
