"""Failing: what Spark, Java, Arrow or the disk say, in one line behind what it means."""

from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from umbel.pipeline.faults import BuildFailed, JavaExited, UnreadFile
from umbel.stores.refusals import unavailable

NOT_BUILT = "cannot build the tables; nothing was published"


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """What Spark, Java or the disk say, in one line behind what it means."""
    try:
        yield
    except (UnreadFile, BuildFailed) as error:
        raise type(error)(f"{what}: {error}") from error
    except (PySparkException, Py4JJavaError) as error:
        raise BuildFailed(f"{what}: {gist_of(error)}") from error
    except (Py4JError, ConnectionError) as error:  # no answer of Java's
        raise JavaExited(f"{what}: Java exited") from error
    except OSError as error:
        told = unavailable(error) or error
        raise BuildFailed(f"{what}: {told.filename or 'the disk'}: {told.strerror or told}") from error


def gist_of(error: Exception) -> str:
    """The first line that says something, and the last cause; Java's errors have a hundred lines."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)[:400]
    lines = _trace_of(error).splitlines()
    causes = [line.partition("Caused by: ")[2] for line in lines if "Caused by: " in line]
    last = causes[-1].strip()[:200] if causes else ""
    return first if not last or last in first else f"{first} ({last})"


def _trace_of(error: Exception) -> str:
    return f"{error}\n{getattr(error, '_stackTrace', '')}"
