"""The web dashboard: pages, API and metrics of a running cluster, as an ASGI application."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.web.application import asgi

__all__ = ["asgi"]


def __getattr__(name: str) -> Any:
    """The application is loaded when it is asked for: parts of the package need no web server."""
    if name == "asgi":
        from umbel.web.application import asgi

        return asgi
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
