"""The closing report of the demo: tasks sent, run and repeated, leaders of the schedule, figures from
history.
"""

from collections import Counter
from typing import Any

import click

from umbel.cli.options import print_json, print_table
from umbel.demo.load import KINDS, OF_CELERY
from umbel.demo.story import Outcome
from umbel.text import numbered


def as_data(outcome: Outcome) -> dict[str, Any]:
    """Return the closing report as data, for --json and for the tables."""
    repeated = outcome.ledger.repeats()
    crashes = {task_id for task_id in repeated if outcome.sent.kinds.get(task_id) == "crashing"}
    recovered = outcome.ledger.recovered(outcome.killed).keys() - crashes
    return {
        "ok": not outcome.verdict.problems,
        "problems": outcome.verdict.problems,
        "seconds": round(outcome.took_s, 1),
        "sent": len(outcome.sent),
        "kinds": {kind: _of_kind(outcome, kind) for kind in _kinds(outcome)},
        "runs": outcome.ledger.total,
        "periodic": len(_ticks(outcome)),
        "repeated": {
            "runs": repeated.total(),
            "because their process crashed": len(crashes),
            "because their worker was killed": len(recovered),
        },
        "killed": outcome.killed,
        "running_at_the_kill": len(outcome.interrupted),
        "led": outcome.leaders,
        "handed_over_s": round(outcome.handed_over_s, 1),
        "elected": outcome.winner,
        "history": outcome.figures,
        "no_history": outcome.no_history,
        "html": str(outcome.html) if outcome.html else None,
    }


def show(outcome: Outcome, *, as_json: bool) -> None:
    """Print the closing report as tables or as JSON."""
    data = as_data(outcome)
    if as_json:
        print_json(data)
        return
    columns = ("kind", "what it does", "sent", "succeeded", "failed", "revoked", "runs")
    rows = [(kind, KINDS[kind][1], *counts.values()) for kind, counts in data["kinds"].items()]
    click.echo()
    print_table(columns, rows)
    click.echo()
    repeated, running = data["repeated"], numbered(data["running_at_the_kill"], "task")
    facts = [
        ("periodic task", f"{numbered(data['periodic'], 'slot')} of one second, each sent once"),
        (
            "killed",
            f"{data['killed']} (-9), while it ran {running}, which others ran again",
        ),
        ("periodic tasks led by", f"{' → '.join(data['led'])}, handed over after {data['handed_over_s']} s"),
        ("elected", data["elected"]),
        ("runs repeated", _repeats(repeated)),
    ]
    print_table(("what happened", ""), facts)
    if data["history"]:
        click.echo()
        print_table(("what history says", "", "", ""), _in_two_columns(list(data["history"].items())))
    click.echo()
    if outcome.no_history:
        click.echo(f"no history: {outcome.no_history}")
    if data["html"]:
        click.echo(f"the report: {data['html']}")
    for problem in data["problems"]:
        click.secho(f"wrong: {problem}", fg="red")
    verdict = "everything fits together" if data["ok"] else numbered(len(data["problems"]), "problem")
    ledger = "the tasks' own ledger"
    compared = f"results, {ledger} and history" if data["history"] else f"results and {ledger}"
    click.echo(f"{numbered(data['sent'], 'task')} in {data['seconds']} s\n{compared} compared: {verdict}")


def _kinds(outcome: Outcome) -> list[str]:
    """Return all kinds of tasks; without those of the Celery app if it did not run."""
    sent = set(outcome.sent.kinds.values())
    return [kind for kind in KINDS if kind not in OF_CELERY or kind in sent]


def _of_kind(outcome: Outcome, kind: str) -> dict[str, int]:
    """Count the outcomes and runs of the tasks of one kind."""
    ids = [task_id for task_id, found in outcome.sent.kinds.items() if found == kind]
    states = Counter(outcome.states.get(task_id, "unknown") for task_id in ids)
    wanted = set(ids)
    runs = sum(len(nodes) for (task_id, _), nodes in outcome.ledger.runs.items() if task_id in wanted)
    return {
        "sent": len(ids),
        "succeeded": states["SUCCESS"],
        "failed": states["FAILURE"],
        "revoked": states["REVOKED"],
        "runs": runs,
    }


def _ticks(outcome: Outcome) -> set[int]:
    """Return the slots in which the periodic task ran."""
    return {outcome.slots[task_id] for task_id in outcome.ledger.ids if task_id in outcome.slots}


def _in_two_columns(figures: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Arrange two figures in each row, so that the report fits on a screen."""
    half = (len(figures) + 1) // 2
    left, right = figures[:half], [*figures[half:], ("", "")]
    return [(*first, *second) for first, second in zip(left, right, strict=False)]


def _repeats(repeated: dict[str, int]) -> str:
    """Describe the repeated runs and their reasons in a short line."""
    total, *reasons = repeated.items()
    listed = "; ".join(f"{count} {why.replace('because their', 'whose')}" for why, count in reasons if count)
    return f"{total[1]}: {listed}" if listed else str(total[1])
