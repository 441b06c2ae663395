"""Pictures."""

# mypy: disable-error-code="untyped-decorator, misc"

from celery import shared_task


@shared_task(acks_late=True)
def thumbnail(path: str = "") -> str:
    return path


@shared_task(acks_late=True)
def resize(path: str = "") -> str:
    return path


@shared_task(acks_late=True)
def transcode(path: str = "") -> str:
    return path


@shared_task(acks_late=True)
def watermark(path: str = "") -> str:
    return path


@shared_task(acks_late=True)
def upload(path: str = "") -> str:
    return path


@shared_task(acks_late=True)
def purge_cdn(path: str = "") -> str:
    return path


@shared_task(acks_late=True)
def index(path: str = "") -> str:
    return path


@shared_task(acks_late=True)
def ocr(path: str = "") -> str:
    return path
