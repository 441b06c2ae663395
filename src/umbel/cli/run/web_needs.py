"""What the dashboard needs that may not be installed; asked before anything else is loaded."""

from importlib.util import find_spec

import click


def missing_for_web() -> list[str]:
    return [
        name for name in ("starlette", "uvicorn", "jinja2", "prometheus_client") if find_spec(name) is None
    ]


def require_web() -> None:
    if missing := missing_for_web():
        raise click.ClickException(f"umbel web needs {missing[0]}: pip install 'umbel[web]'")
