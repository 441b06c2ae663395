"""`umbel call` and `umbel result`: send a task from the command line, and show its result."""

import json
from collections.abc import Iterable
from typing import Any

import click

from umbel.app.app import App
from umbel.cli import completion, exits
from umbel.cli.options import app_option, json_option, other_broker_option, print_json, say, use_broker
from umbel.errors import NoApp, WireError, nearest
from umbel.launch.loading import FoundApp, find_app
from umbel.protocol.delivery.states import PENDING, READY_STATES, SUCCESS
from umbel.text import lines
from umbel.wire.message import parse_instant
from umbel.wire.result import decode_result

# ---- result ----------------------------------------------------------------------------------------


@click.command("result")
@app_option
@click.argument("task_id")
@click.option("--wait", type=float, metavar="SECONDS", default=0.0, help="Seconds to wait for the result.")
@click.option("--forget", is_flag=True, help="Remove the result after showing it.")
@json_option
def result_command(app_name: str | None, task_id: str, wait: float, forget: bool, as_json: bool) -> int:
    """Show the result of TASK_ID.

    Exit code: 0 succeeded, 1 failed or revoked, 3 no final state (unknown, waiting or running).
    """

    app = find_app(app_name).app
    code = show(app, task_id, wait=wait, as_json=as_json)
    if forget and code != exits.NOT_FOUND:
        app.AsyncResult(task_id).forget()
    return code


def show(app: "App", task_id: str, *, wait: float, as_json: bool) -> int:
    """Print the stored result of a task, and return the exit code. Wait up to `wait` seconds for the
    result.
    """
    if wait > 0:
        app.backend.wait([task_id], wait)
    stored = app.backend.read([task_id]).get(task_id)
    found = decode_result(stored.payload) if stored else None
    state = found.status if found else PENDING
    if as_json:
        result, traceback = (found.result, found.traceback) if found else (None, None)
        print_json({"task_id": task_id, "state": state, "result": result, "traceback": traceback})
    elif found is None:
        click.echo(
            f"umbel: no result of {task_id} yet: the task is unknown, waiting or running; "
            "`umbel status` shows whether a worker runs",
            err=True,
        )
    elif state == SUCCESS:
        say(repr(found.result))
    else:
        say(f"{state}: {_described(found.result)}")
        if found.traceback:
            click.echo(lines(found.traceback.rstrip()), err=True)
    if state not in READY_STATES:
        return exits.NOT_FOUND
    return exits.OK if state == SUCCESS else exits.FAILED


def _described(result: object) -> str:
    """Return the text of a failed task's stored result."""
    if isinstance(result, dict) and "exc_type" in result:
        message = result.get("exc_message") or []
        args = message if isinstance(message, list | tuple) else [message]
        return f"{result['exc_type']}({', '.join(map(repr, args))})"
    return repr(result)


# ---- call ------------------------------------------------------------------------------------------


def _moment(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """Check --eta, and return it unchanged."""

    try:
        if text is not None:
            parse_instant(text)
    except WireError as error:
        raise click.BadParameter(f"{error}; write it as 2030-01-31T18:00:00+01:00") from None
    return text


@click.command("call")
@app_option
@other_broker_option
@click.argument("task", shell_complete=completion.tasks)
@click.argument("args", nargs=-1)
@click.option("--args", "json_args", metavar="JSON", help="Positional arguments as a JSON list.")
@click.option("--kwargs", "json_kwargs", metavar="JSON", help="Keyword arguments as a JSON object.")
@click.option("--countdown", type=float, help="Seconds until the task runs.")
@click.option("--eta", callback=_moment, help="Time at which the task runs (ISO 8601).")
@click.option("--expires", type=float, help="Seconds after which the task no longer runs.")
@click.option("-q", "--queue", shell_complete=completion.queues, help="Queue of the task.")
@click.option("--priority", type=click.IntRange(0, 9), help="0 (first) to 9.")
@click.option("--task-id", help="Id of the task.")
@click.option("--wait", type=float, metavar="SECONDS", help="Wait for the result and print it.")
@click.option("--unregistered", is_flag=True, help="Send the task although the app has none of this name.")
@json_option
def send_task_command(
    app_name: str | None,
    url: str | None,
    task: str,
    args: tuple[str, ...],
    json_args: str | None,
    json_kwargs: str | None,
    wait: float | None,
    unregistered: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Send TASK. Each of ARGS is read as JSON, or as text where it is not JSON.

    NAME=VALUE is a keyword argument; a text that looks like one is written as JSON: '"a=b"'.
    """
    found = _find(app_name, url)
    app, project = (found.app, found.project) if found else (App("umbel"), None)
    known = project.task_names() if project else app.tasks
    if task not in known and not unregistered and found:
        near = nearest(task, known)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"
        raise click.UsageError(f"no task named {task!r} in this app; {hint} (--unregistered sends it anyway)")
    positional, keywords = _json_list(json_args), _json_object(json_kwargs)
    _take(args, positional, keywords)
    given = {name: value for name, value in options.items() if value is not None}
    if project and task in known:
        given.setdefault("queue", project.queue_of(task))
    if task in app.tasks:
        try:
            app.tasks[task].check_arguments(positional, keywords)
        except TypeError as error:
            raise click.UsageError(str(error)) from None
    try:
        result = app.send(task, positional, keywords, given)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:  # the value of an option is out of range
        raise click.UsageError(str(error)) from None
    if wait is None:
        _print({"task_id": result.id}, result.id, as_json=as_json)
        return exits.OK

    return show(app, result.id, wait=wait, as_json=as_json)


def _find(app_name: str | None, url: str | None) -> FoundApp | None:
    """Find the app. Return None if there is none and the broker's address is given."""
    use_broker(url)
    try:
        return find_app(app_name)
    except NoApp:
        if url is None:
            raise
        return None


def _take(words: Iterable[str], positional: list[Any], keywords: dict[str, Any]) -> None:
    """Add arguments that were given as words to those that were given as JSON."""
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and name.isidentifier()):
            positional.append(_value(word))
        elif name in keywords:
            raise click.UsageError(f"the argument {name!r} is given twice")
        else:
            keywords[name] = _value(text)


def _print(data: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print data as JSON or as text."""
    click.echo(json.dumps(data) if as_json else text)


def _value(text: str) -> Any:
    """Parse a word as JSON; return it as text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_list(text: str | None) -> list[Any]:
    """Parse --args. Raise BadParameter if it is not a JSON list."""
    found = _parsed(text, "--args") if text else []
    if not isinstance(found, list):
        raise click.BadParameter(f"{text!r} is not a JSON list", param_hint="--args")
    return found


def _json_object(text: str | None) -> dict[str, Any]:
    """Parse --kwargs. Raise BadParameter if it is not a JSON object."""
    found = _parsed(text, "--kwargs") if text else {}
    if not isinstance(found, dict):
        raise click.BadParameter(f"{text!r} is not a JSON object", param_hint="--kwargs")
    return found


def _parsed(text: str, option: str) -> Any:
    """Parse the JSON of an option. Raise BadParameter if it is invalid."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not JSON: {error}", param_hint=option) from None
