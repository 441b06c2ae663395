"""All cases, a file for each subject: `CASES` of `asking` holds them once this is imported."""

from tests.celery_apps.cases import (
    chains,
    chords,
    errbacks,
    hooks,
    limits,
    messages,
    results,
    retries,
    stamps,
)

__all__ = ["chains", "chords", "errbacks", "hooks", "limits", "messages", "results", "retries", "stamps"]
