"""`umbel result`: show how a task ended."""

import click

from umbel.app.app import App
from umbel.cli import exits
from umbel.cli.options import app_option, json_option
from umbel.cli.show.printing import print_json, say
from umbel.launch.loading import find_app
from umbel.protocol.delivery.states import PENDING, READY_STATES, SUCCESS
from umbel.text import lines
from umbel.wire.result import decode_result


@click.command("result")
@app_option
@click.argument("task_id")
@click.option("--wait", type=float, metavar="SECONDS", default=0.0, help="Seconds to wait for the result.")
@click.option("--forget", is_flag=True, help="Remove the result after showing it.")
@json_option
def command(app_name: str | None, task_id: str, wait: float, forget: bool, as_json: bool) -> int:
    """Show the result of TASK_ID.

    Exit code: 0 succeeded, 1 failed or revoked, 3 no final state (unknown, waiting or running).
    """

    app = find_app(app_name).app
    code = show(app, task_id, wait=wait, as_json=as_json)
    if forget and code != exits.NOT_FOUND:
        app.AsyncResult(task_id).forget()
    return code


def show(app: "App", task_id: str, *, wait: float, as_json: bool) -> int:

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
    if isinstance(result, dict) and "exc_type" in result:
        message = result.get("exc_message") or []
        args = message if isinstance(message, list | tuple) else [message]
        return f"{result['exc_type']}({', '.join(map(repr, args))})"
    return repr(result)
