"""Static files: read once, served from memory, compressed for who takes it.

There are some ten of them, all small, and they change with the version alone: so pages name them with it
and browsers keep them.
"""

import gzip
from mimetypes import guess_type
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

KEPT = "public, max-age=86400"
COMPRESSED = {".js", ".css", ".svg"}
TYPES = {".js": "text/javascript", ".LICENSE": "text/plain"}


class Files:
    """An ASGI application with the files below one folder, by their exact names and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._plain = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self._packed = {
            name: gzip.compress(body, mtime=0)
            for name, body in self._plain.items()
            if Path(name).suffix in COMPRESSED
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        name = request.scope["path"].removeprefix(request.scope.get("root_path", "")).lstrip("/")
        body = self._plain.get(name)
        if body is None or request.method not in {"GET", "HEAD"}:
            return PlainTextResponse("no such file", 404)
        headers = {"Cache-Control": KEPT, "Vary": "Accept-Encoding"}
        suffix = Path(name).suffix
        kind = TYPES.get(suffix) or guess_type(name)[0] or "application/octet-stream"
        if name in self._packed and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(
                self._packed[name], media_type=kind, headers=headers | {"Content-Encoding": "gzip"}
            )
        return Response(body, media_type=kind, headers=headers)
