"""Showing: the arguments and the error of a call as results and headers may show them, without what is
sensitive."""

from typing import Any

from msgspec.structs import replace

from umbel.app.running.request import Request
from umbel.errors import WireError
from umbel.protocol.delivery.sensitive import MASK, Secrets, Sensitive
from umbel.wire.result import ExceptionMap, exception_map
from umbel.wire.task import TaskCall, show_args, show_kwargs
from umbel.wire.values import encode_json

EXCEPTION_ARGS_MAX = 16  # each up to a megabyte; a result must fit its limit


def shown_arguments(request: Request, hides: Sensitive | None) -> dict[str, Any]:
    """The arguments as they are, or as text when they came in another form than results have."""
    args, kwargs = request.args, request.kwargs
    if hides is not None:
        args, kwargs = hides.hide(args, kwargs, MASK)
    given = {"args": args, "kwargs": kwargs}
    try:
        encode_json(given)
    except WireError:
        return {"args": show_args(args), "kwargs": show_kwargs(kwargs)}
    return given


def hidden(call: TaskCall, hides: Sensitive) -> Secrets:
    """What must not get out; the headers, which further attempts take over, do not say it any more."""
    args, kwargs = hides.hide(call.args, call.kwargs)
    call.headers = replace(call.headers, argsrepr=show_args(args), kwargsrepr=show_kwargs(kwargs))
    return Secrets(hides.values(call.args, call.kwargs))


def described(error: BaseException, secrets: Secrets | None) -> ExceptionMap:
    found = exception_map(error)
    if len(found["exc_message"]) > EXCEPTION_ARGS_MAX:
        found["exc_message"] = [*found["exc_message"][:EXCEPTION_ARGS_MAX], "…"]
    if secrets:
        found["exc_message"] = secrets.strike_all(found["exc_message"])
    return found
