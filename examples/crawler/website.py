"""A small web site to crawl, served from memory: fifteen pages that link to one another, and a dead link."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGES = 15


def page(number: int) -> str:
    """Each page links to two more, as in a heap, and home; the last one also to a page that is not there."""
    linked = [one for one in (2 * number + 1, 2 * number + 2) if one < PAGES]
    targets = ["/", *(f"/page/{one}" for one in linked), *(["/missing"] if number == PAGES - 1 else [])]
    links = "\n".join(f'<a href="{target}">{target}</a>' for target in targets)
    return f"<!doctype html>\n<title>Page {number}</title>\n{links}\n"


SITE = {"/": page(0)} | {f"/page/{number}": page(number) for number in range(PAGES)}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = SITE.get(self.path)
        self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
        self.end_headers()
        self.wfile.write((found or "<title>Not found</title>").encode())

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the crawler says what it saw."""


@contextmanager
def serving() -> Iterator[str]:
    """Serve on a free port while the block runs; the address of the first page."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
