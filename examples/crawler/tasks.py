"""Fetch one page: an async task, of which one worker runs hundreds side by side."""

import asyncio
from html.parser import HTMLParser
from typing import TypedDict
from urllib.parse import urldefrag, urljoin, urlsplit

from umbel import App

# Coroutines on one event loop instead of child processes: a page that is waited for costs nothing.
app = App("crawler", worker_pool="asyncio", worker_concurrency=100)

PAGE_MAX_BYTES = 1_000_000


class Page(TypedDict):
    """What travels back as JSON."""

    url: str
    status: int
    title: str
    links: list[str]


@app.task(soft_time_limit=20, autoretry_for=(OSError,), retry_backoff=True)
async def fetch(url: str) -> Page:
    status, html = await get(url)
    outline = Outline()
    outline.feed(html)
    links = {urldefrag(urljoin(url, target)).url for target in outline.targets}
    return Page(url=url, status=status, title=outline.title.strip(), links=sorted(links))


async def get(url: str) -> tuple[int, str]:
    """HTTP in its smallest form. A crawler for the open web wants a library such as httpx here."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=PAGE_MAX_BYTES)
    try:
        writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read(PAGE_MAX_BYTES)
        while chunk := await reader.read(PAGE_MAX_BYTES - len(body)):
            body += chunk
    finally:
        writer.close()
    return int(head.split(maxsplit=2)[1]), body.decode(errors="replace")


class Outline(HTMLParser):
    """The title of a page and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.targets: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_title = tag == "title"
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
