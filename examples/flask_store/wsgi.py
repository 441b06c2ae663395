"""What servers and workers load: `flask --app wsgi run`, `umbel worker -A wsgi`."""

from store import create_app
from tasks import umbel

__all__ = ["app", "umbel"]

app = create_app()
