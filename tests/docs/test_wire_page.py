"""The page of the wire shows what is sent, field by field."""

import json
import re
from typing import Any

from tests.docs.blocks import DOCS, blocks_of
from umbel import App
from umbel.wire import message
from umbel.wire.call import HEADER_NAMES
from umbel.wire.typed import restore, tag

PAGE = DOCS / "wire.md"
HEADERS, BODY, TYPED = (json.loads(block.text) for block in blocks_of(PAGE) if block.language == "json")


def _sent() -> tuple[dict[str, Any], list[Any]]:
    app = App("shop")

    @app.task(name="shop.add")
    def add(x: int, y: int) -> int:
        return x + y

    call = (add.s(2, 3) | add.s(10)).clone()
    call.freeze()
    (prepared,) = call.prepare()
    return json.loads(prepared.outgoing.message.headers), json.loads(prepared.outgoing.message.body)


def _without_ids(value: Any) -> Any:
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "an id", json.dumps(value))
    return json.loads(re.sub(r'"gen\d+@[^"]+"', '"who"', text))


def test_the_message_on_the_page_is_the_one_that_is_sent() -> None:
    headers, body = _sent()
    assert list(HEADERS) == list(headers)
    assert (_without_ids(HEADERS), _without_ids(BODY)) == (_without_ids(headers), _without_ids(body))


def test_every_header_is_explained() -> None:
    rows = "\n".join(re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == HEADER_NAMES


def test_the_value_on_the_page_is_read_and_written_so() -> None:
    value = restore(TYPED, message.DEFAULT_LIMITS)
    assert value != TYPED and tag(value) == TYPED


def test_the_limits_on_the_page_hold() -> None:
    table = PAGE.read_text().partition("## Limits")[2]
    shown = [int(number) for number in re.findall(r"^\| [^|]+ \| (\d+)", table, re.MULTILINE)]
    default = message.DEFAULT_LIMITS
    assert shown == [
        message.HEADERS_MAX_BYTES,
        message.NAME_MAX_BYTES,
        message.TASK_MAX_CHARS,
        default.size_max_bytes,
        default.depth_max,
        default.number_digits_max,
    ]
