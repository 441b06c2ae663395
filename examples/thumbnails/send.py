"""Draw some pictures, have a thumbnail made of each, and wait for the page that shows them."""

from pathlib import Path

from pictures import Picture, write_ppm
from tasks import app, make_gallery, make_thumbnail
from umbel import chord

FOLDER = Path(__file__).parent / "album"
COUNT, WIDTH, HEIGHT = 8, 320, 240


def draw(number: int) -> Path:
    """A gradient from one corner to the other, with more blue in each picture."""
    blue = 255 * number // COUNT
    pixels = bytes(
        value
        for y in range(HEIGHT)
        for x in range(WIDTH)
        for value in (255 * x // WIDTH, 255 * y // HEIGHT, blue)
    )
    path = FOLDER / f"picture-{number}.ppm"
    write_ppm(Picture(WIDTH, HEIGHT, pixels), path)
    return path


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    parts = [make_thumbnail.s(str(draw(number)), width=80) for number in range(COUNT)]
    page = FOLDER / "index.html"
    shown = chord(parts, make_gallery.s(page=str(page))).delay().get(timeout=60)
    print(f"{shown} thumbnails in {page.relative_to(FOLDER.parent)}")
    app.close()


if __name__ == "__main__":
    main()
