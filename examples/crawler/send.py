"""Crawl a site, the one that comes with the example or that of an address given, and list its pages."""

import asyncio
import sys
from urllib.parse import urlsplit

from tasks import Page, app, fetch
from website import serving

PAGES_MAX = 500
PAGE_S = 60.0


async def crawl(start: str) -> list[Page]:
    """Level by level: all pages of a level are fetched side by side."""
    site = urlsplit(start).netloc
    seen, level, pages = {start}, [start], list[Page]()
    while level:
        results = await app.asend_many(map(fetch.s, level))
        fetched = await asyncio.gather(*(result.aget(timeout=PAGE_S) for result in results))
        pages += fetched
        found = {link for page in fetched for link in page["links"] if urlsplit(link).netloc == site}
        level = sorted(found - seen)[: PAGES_MAX - len(seen)]
        seen.update(level)
    return pages


def report(pages: list[Page]) -> None:
    for page in pages:
        if page["status"] != 200:
            print(f"{page['status']} {urlsplit(page['url']).path}")
    print(f"{len(pages)} pages crawled")


def main() -> None:
    if len(sys.argv) > 1:
        report(asyncio.run(crawl(sys.argv[1])))
    else:
        with serving() as address:
            report(asyncio.run(crawl(address)))
    app.close()


if __name__ == "__main__":
    main()
