import pickle
from copy import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umbel import App, Signature, chain, chord, group
from umbel.app.canvas.chain import Chain
from umbel.app.canvas.signature import signature_from
from umbel.app.options import SendOptions
from umbel.errors import BadMessage, ConfigurationError, NotRegistered
from umbel.wire.values import decode_json, encode_json

APP = App("tests", broker="sqlite:////never/opened.db")


@APP.task(name="shop.pack")
def pack(box: str, *things: str, count: int = 1) -> str:
    return f"{box}:{'+'.join(things)}:{count}"


# -- making ----------------------------------------------------------------------------------------


def test_a_signature_is_a_call_as_a_value() -> None:
    call = pack.s("red", count=2)
    assert (call.task, call.args, call.kwargs, call.immutable) == ("shop.pack", ["red"], {"count": 2}, False)
    assert call.options == {}
    assert repr(call) == "shop.pack('red', count=2)"


def test_an_immutable_signature_takes_nothing_more() -> None:
    call = pack.si("red")
    assert call.immutable
    assert call.clone(("blue",), {"count": 3}) == call
    assert call.clone(queue="slow").options == {"queue": "slow"}


def test_setting_options_changes_the_signature_itself() -> None:
    call = pack.s("red")
    assert call.set(queue="slow").set(priority=3) is call
    assert call.options == {"queue": "slow", "priority": 3}


def test_a_clone_has_further_arguments_first_and_further_options_on_top() -> None:
    call = pack.s("red", count=1).set(queue="slow", priority=3)
    clone = call.clone(("big",), {"count": 2}, queue="fast")
    assert (clone.args, clone.kwargs) == (["big", "red"], {"count": 2})
    assert clone.options == {"queue": "fast", "priority": 3}
    assert (call.args, call.kwargs, call.options["queue"]) == (["red"], {"count": 1}, "slow")


def test_a_clone_shares_nothing_with_its_original() -> None:
    call = Signature[Any]("t", [[1]], {"k": [2]}, {"headers": {"a": [3]}})
    clone = call.clone()
    clone.args[0].append(9)
    clone.kwargs["k"].append(9)
    clone.options["headers"]["a"].append(9)
    assert call == Signature[Any]("t", [[1]], {"k": [2]}, {"headers": {"a": [3]}})


def test_links_are_part_of_a_clone() -> None:
    call = pack.s("red")
    call.link(pack.s("blue"))
    call.set(link_error=pack.si("green"))
    assert call.clone() == call


def test_what_is_linked_can_still_be_changed() -> None:
    call, callback = pack.s("red"), pack.s("blue")
    assert call.link(callback) is callback
    callback.set(queue="slow")
    assert call.to_map()["options"]["link"][0]["options"] == {"queue": "slow"}


def test_freezing_fixes_the_id_once() -> None:
    call = pack.s("red")
    fixed = call.freeze()
    assert call.freeze("other") == fixed == call.options["task_id"]


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    call: Any = pack.s("red")
    for refused in (
        lambda: call.set(cuontdown=3),
        lambda: call.clone(cuontdown=3),
        lambda: call.apply_async(cuontdown=3),
        lambda: APP.signature("shop.pack", cuontdown=3),  # type: ignore[call-arg]
        lambda: APP.signature({"task": "shop.pack", "options": {"cuontdown": 3}}),
    ):
        with pytest.raises(TypeError, match=r"unknown option 'cuontdown'.*did you mean 'countdown'\?"):
            refused()


def test_a_signature_of_no_app_says_how_to_get_one() -> None:
    with pytest.raises(ConfigurationError, match=r"'shop\.pack' belongs to no app; use app\.signature"):
        Signature[Any]("shop.pack").delay()


def test_an_app_adopts_a_signature_that_has_none() -> None:
    mine = APP.signature(Signature[str]("shop.pack", ["red"]))
    with APP.eager():
        assert mine.delay().get() == "red::1"


# -- calling ---------------------------------------------------------------------------------------


def test_a_signature_can_be_called_here_and_now() -> None:
    assert pack.s("string", count=2)("red") == "red:string:2"
    assert pack.si("red")("ignored") == "red::1"


def test_a_signature_of_an_unknown_task_cannot_be_called() -> None:
    with pytest.raises(NotRegistered, match=r"'no\.such'"):
        APP.signature("no.such")()


def test_sending_leaves_the_signature_as_it_was() -> None:
    call = pack.s("red")
    with APP.eager():
        first, second = call.delay(), call.apply_async(("big",), {"count": 2}, task_id="t")
    assert (first.get(), second.get(), second.id) == ("red::1", "big:red:2", "t")
    assert call == pack.s("red")


# -- maps ------------------------------------------------------------------------------------------


def test_a_signature_travels_as_celerys_six_keys() -> None:
    call = pack.s("red", count=2).set(queue="slow")
    call.link(pack.si("blue"))
    assert call.to_map() == {
        "task": "shop.pack",
        "args": ["red"],
        "kwargs": {"count": 2},
        "options": {
            "queue": "slow",
            "link": [
                {
                    "task": "shop.pack",
                    "args": ["blue"],
                    "kwargs": {},
                    "options": {},
                    "subtask_type": None,
                    "immutable": True,
                }
            ],
        },
        "subtask_type": None,
        "immutable": False,
    }


@pytest.mark.parametrize(
    "wrong", [3, {}, {"task": ""}, {"task": "t", "args": 3}, {"task": "t", "options": []}]
)
def test_a_map_that_is_no_signature_is_refused(wrong: Any) -> None:
    with pytest.raises(BadMessage, match="signature"):
        APP.signature(wrong)


def test_an_app_makes_signatures_from_names_maps_and_signatures() -> None:
    by_name = APP.signature("shop.pack", ("red",), {"count": 2}, queue="slow")
    assert by_name == pack.s("red", count=2).set(queue="slow")
    assert APP.signature(by_name.to_map()) == by_name
    assert APP.signature(by_name) == by_name
    assert APP.signature(by_name) is not by_name
    assert APP.signature(by_name.to_map(), ("big",)).args == ["big", "red"]


def test_equal_signatures_are_equal_and_cannot_be_keys() -> None:
    assert pack.s(1) == pack.s(1) != pack.s(2)
    assert pack.s(1) != pack.si(1)
    assert pack.s(1) != pack.s(1).set(queue="slow")
    assert pack.s(1) != "shop.pack(1)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(pack.s(1))


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
options = st.fixed_dictionaries(
    {},
    optional={
        "queue": names,
        "task_id": names,
        "countdown": st.floats(0, 1e6),
        "priority": st.integers(0, 9),
        "headers": st.dictionaries(names, plain_values, max_size=2),
    },
)


@st.composite
def signatures(draw: st.DrawFn, linked: bool = True) -> Signature[Any]:
    call = Signature[Any](
        draw(names),
        draw(st.lists(plain_values, max_size=3)),
        draw(st.dictionaries(names, plain_values, max_size=2)),
        _as_options(draw(options)),
        immutable=draw(st.booleans()),
        app=APP,
    )
    if linked:
        for callback in draw(st.lists(signatures(linked=False), max_size=2)):
            call.link(callback)
        for errback in draw(st.lists(signatures(linked=False), max_size=1)):
            call.link_error(errback)
    return call


def _as_options(given: dict[str, Any]) -> SendOptions:
    return given  # type: ignore[return-value]


@settings(max_examples=50)
@given(signatures())
@example(Signature[Any]("group", [1], app=APP))
@example(Signature[Any]("celery.chain", [1], app=APP))
def test_a_signature_is_the_same_after_a_trip_over_the_wire(call: Signature[Any]) -> None:
    again = signature_from(decode_json(encode_json(call.to_map())), APP)
    assert again == call
    assert again.to_map() == call.to_map()
    assert call.clone() == call


@settings(max_examples=25)
@given(st.lists(signatures(linked=False), min_size=1, max_size=4), options)
def test_a_chain_is_the_same_after_a_trip_over_the_wire(
    steps: list[Signature[Any]], chosen: dict[str, Any]
) -> None:
    whole = Chain(*steps, app=APP, options=_as_options(chosen))
    again = signature_from(decode_json(encode_json(whole.to_map())), APP)
    assert isinstance(again, Chain)
    assert again == whole
    assert whole.clone() == whole


def test_a_signature_can_be_made_immutable(app: App) -> None:
    add = app.task(name="add")(lambda x, y=0: x + y)
    with app.eager():
        assert (add.s(1) | add.s(5).set(immutable=True)).delay().get() == 5
        assert (add.s(1) | group(add.s(5), add.s(6)).set(immutable=True)).delay().get() == [5, 6]
        assert (add.s(1) | chord([add.s(5)], add.s([0])).set(immutable=True)).delay().get() == [5, 0]
        whole = chain(add.s(1), add.s(2)).set(immutable=True)
        assert whole.delay(100).get() == 3
        assert signature_from(whole.to_map(), app).delay(100).get() == 3


def test_a_signature_is_made_from_its_map(app: App) -> None:
    whole = app.signature("add", (1, 2)) | group(app.signature("add"), app.signature("add"))
    made = Signature.from_dict(whole.to_map(), app=app)
    assert (made, type(made)) == (whole, type(whole))
    assert Signature.from_dict(whole.to_map()) == whole


@pytest.mark.parametrize("serializer", ["json", "msgpack", "pickle"])
def test_a_signature_may_be_an_argument_and_a_result(serializer: str) -> None:
    app = App(
        "signatures", broker="sqlite:////nowhere/signatures.db", accept_content=["json", "msgpack", "pickle"]
    )
    add = app.task(name="add")(lambda x, y: x + y)
    later = app.task(name="later")(lambda call: app.signature(call).clone([1]))
    with app.eager():
        returned = later.apply_async((add.s(2),), serializer=serializer).get()
        assert app.signature(returned) == add.s(1, 2)


def test_a_copy_of_a_signature_keeps_its_app_and_a_pickled_one_does_not(app: App) -> None:
    call = app.signature("add", (1,)).set(queue="slow")
    assert (copy(call), copy(call)._app) == (call, app)
    again = pickle.loads(pickle.dumps(call))
    assert (again, again._app) == (call, None)
