"""Templates make, byte for byte, the messages that encoding the same calls makes."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.wire import strategies
from umbel.errors import WireError
from umbel.wire.call import TaskCall, TaskHeaders
from umbel.wire.message import Message, Outgoing
from umbel.wire.signing import Keyring, signer_of
from umbel.wire.task import SMALL_BYTES, CallTemplate, encode_task

texts = st.text(max_size=20)  # surrogates too: those are refused
names = st.sampled_from(["100%", "%b"]) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20
)
shared = st.builds(
    TaskHeaders,
    task=names,
    id=st.just(""),
    timelimit=st.tuples(st.none() | st.integers(0, 99), st.none() | st.floats(0, 99)),
    ignore_result=st.booleans() | st.none(),
)
gaps = st.fixed_dictionaries(
    {
        "root_id": st.none() | names,
        "parent_id": st.none() | texts,
        "group": st.none() | texts,
        "group_index": st.none() | st.integers(),
        "origin": texts,
    }
)
awkward = st.sampled_from([float("nan"), float("inf"), -(10**4300), 10**5000, object, 2**70, b"x", "\ud800"])
items = strategies.atoms | strategies.values | awkward | st.text(min_size=90, max_size=120)
args = st.lists(items, max_size=4) | st.lists(st.integers(), max_size=40)
kwargs = st.dictionaries(names | st.sampled_from(["__type__", "__value__"]), items, max_size=3)


def outcome(make: Callable[[], Message]) -> Message | tuple[type, str]:
    try:
        return make()
    except WireError as error:
        return type(error), str(error)


@strategies.quick
@given(shared, names, args, kwargs, gaps, st.integers(0, 9))
def test_a_filled_template_is_what_the_whole_call_encodes_to(
    headers: TaskHeaders,
    task_id: str,
    args: list[Any],
    kwargs: dict[str, Any],
    gaps: dict[str, Any],
    priority: int,
) -> None:
    call = TaskCall(replace(headers, id=task_id, **gaps), args, kwargs, reply_to="me", priority=priority)
    template = CallTemplate(headers)
    for given_args in (args, tuple(args)):
        made = outcome(
            lambda args=given_args: template.message(  # type: ignore[misc]
                task_id, args, kwargs, priority=priority, reply_to="me", **gaps
            )
        )
        assert made == outcome(lambda: encode_task(call))


@strategies.quick
@given(shared, names, args, kwargs, gaps)
def test_where_messages_are_signed_the_headers_are_in_the_form_that_is_signed(
    headers: TaskHeaders, task_id: str, args: list[Any], kwargs: dict[str, Any], gaps: dict[str, Any]
) -> None:
    """A signature is made of them as they are; a worker of Umbel 0.3 sorts them before it compares."""
    plain = outcome(lambda: CallTemplate(headers).message(task_id, args, kwargs, **gaps))
    ordered = outcome(lambda: CallTemplate(headers, is_canonical=True).message(task_id, args, kwargs, **gaps))
    if isinstance(plain, Message):
        sorted_headers = msgspec.json.encode(msgspec.json.decode(plain.headers), order="sorted")
        plain = replace(plain, headers=sorted_headers)
        signer = signer_of(Keyring([("k", b"s" * 16)]), "here")
        assert isinstance(ordered, Message)
        sent = Outgoing("q", ordered)
        assert signer.sign_task(sent, 5.0, is_canonical=True) == signer.sign_task(sent, 5.0)
    assert ordered == plain


@pytest.mark.parametrize("size", [SMALL_BYTES - 6, SMALL_BYTES - 5, 2000])
def test_arguments_are_cut_and_shown_alike_on_both_sides_of_what_is_small(size: int) -> None:
    headers = TaskHeaders(task="t", id="")
    for text in ("x" * size, "\U000e0001" * (size // 4), "'" * size):
        call = TaskCall(replace(headers, id="1"), [text])
        assert CallTemplate(headers).message("1", [text], {}, origin="") == encode_task(call)
