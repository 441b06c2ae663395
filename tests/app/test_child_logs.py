"""What a task prints is logged line by line, at a cost that grows with what it prints and no faster."""

import io
import logging
import threading
import tracemalloc

import pytest

from umbel.app.running.child_logs import LINE_MAX_CHARS, LoggedStream, end_lines


@pytest.fixture
def stream() -> LoggedStream:
    return LoggedStream("tests.stdout", logging.WARNING, io.StringIO())


def test_lines_are_logged_as_they_end(stream: LoggedStream, caplog: pytest.LogCaptureFixture) -> None:
    print("one\ntwo", end="", file=stream)
    assert caplog.messages == ["one"]
    print(" and more", file=stream)
    print("no end", end="", file=stream)
    end_lines()
    assert caplog.messages == ["one", "two and more", "no end"]


def test_threads_do_not_mix_their_lines(stream: LoggedStream, caplog: pytest.LogCaptureFixture) -> None:
    stream.write("mine ")
    thread = threading.Thread(target=stream.write, args=("another\n",))
    thread.start()
    thread.join()
    stream.write("alone\n")
    assert caplog.messages == ["another", "mine alone"]


@pytest.mark.parametrize("pieces", [1, 7, LINE_MAX_CHARS + 1000])
def test_a_line_is_cut_at_its_limit_and_says_what_was_left_out(
    stream: LoggedStream, caplog: pytest.LogCaptureFixture, pieces: int
) -> None:
    text = "x" * (LINE_MAX_CHARS + 1000)
    step = len(text) // pieces
    for start in range(0, len(text), step):
        stream.write(text[start : start + step])
    stream.write("\nnext\n")
    assert caplog.messages == ["x" * LINE_MAX_CHARS + "... (1000 characters left out)", "next"]


def test_a_hundred_million_characters_without_an_end_are_not_copied(
    stream: LoggedStream, caplog: pytest.LogCaptureFixture
) -> None:
    """N1: memory is what shows it without a clock; copying the rest for each piece took minutes."""
    text = "x" * 100_000_000
    tracemalloc.start()
    try:
        stream.write(text)
        end_lines()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
    assert caplog.messages[-1].endswith(f"... ({len(text) - LINE_MAX_CHARS} characters left out)")
