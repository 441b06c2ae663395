"""One task for each picture, and one for the page that shows them all: a chord."""

from html import escape
from pathlib import Path

from pictures import encode_png, read_ppm, shrink
from umbel import App

app = App("thumbnails")


@app.task
def make_thumbnail(picture: str, width: int) -> str:
    """Write a small PNG beside the picture and return its path.

    Running it again writes the same file, so a repeat after a crash does no harm.
    """
    source = Path(picture)
    target = source.with_suffix(".thumb.png")
    target.write_bytes(encode_png(shrink(read_ppm(source), width)))
    return str(target)


@app.task
def make_gallery(thumbnails: list[str], page: str) -> int:
    """The chord's body: it gets the results of all parts, in the order in which they were sent."""
    images = "\n".join(f'<img src="{escape(Path(path).name)}" alt="">' for path in thumbnails)
    Path(page).write_text(f"<!doctype html>\n<title>Gallery</title>\n{images}\n", encoding="utf-8")
    return len(thumbnails)
