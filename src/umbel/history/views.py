"""Views: SQL queries on the tables that users can select from like tables.

Views are not part of a build, so they also work on tables that an earlier version has built. Each view has
described columns, like the tables (`events/tables.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from umbel.events.tables import Kind, Table, TableColumn
from umbel.history.tables import percentiles

# ---- view ------------------------------------------------------------------------------------------

ENDED = "('SUCCESS', 'FAILURE', 'REVOKED')"
"""Final states of a task."""

ANY_TASKS = "tasks_unfiltered"
ANY_TIME = "attempts_any_time"
"""Tables without the time filter, for views that it would falsify: a workflow has tasks outside the selected
time, and a task that waits at its end was sent before it.
"""


@dataclass(frozen=True)
class View:
    """A view with its columns and its query.

    `parameters` makes it a view that is called like a function; `name := default` sets a default. `first` is
    a statement that creates a macro for the query.
    """

    table: Table
    sql: str
    parameters: tuple[str, ...] = ()
    first: str = ""

    @property
    def statements(self) -> tuple[str, ...]:
        """The SQL statements that create the view."""
        made = f"create view {self.table.name} as {self.sql}"
        if self.parameters:
            made = f"create macro {self.table.name}({', '.join(self.parameters)}) as table {self.sql}"
        return (self.first, made) if self.first else (made,)

    @property
    def source(self) -> str:
        """The SQL expression after FROM to read the view."""
        return f"{self.table.name}()" if self.parameters else self.table.name

    @property
    def heading(self) -> str:
        """The view's name with its parameters, for documentation."""
        return f"{self.table.name}({', '.join(self.parameters)})" if self.parameters else self.table.name


def sure(name: str, kind: Kind, doc: str) -> TableColumn:
    """Return a column that is never null."""
    return TableColumn(name, kind, doc, nullable=False)


# ---- queues ----------------------------------------------------------------------------------------
#
# The number of waiting and running attempts of each queue, and the waiting times, for each minute. An
# attempt waits from the time when it was sent and due until its start. An attempt without a recorded start
# or end counts as waiting, unless its task has ended or has a later attempt. Depths are counted at the end
# of each second.

_QUEUES_SQL = f"""
with gone as (
    select open.task_id, open.attempt from {ANY_TIME} open join {ANY_TASKS} task using (task_id)
    where open.ended_at is null and (task.retries > open.attempt or task.state in {ENDED})
), attempt as (
    select queue, wait_s, epoch_us(started_at) as started,
        coalesce(
            epoch_us(started_at) - (wait_s * 1e6)::bigint, epoch_us(sent_at), epoch_us(received_at)
        ) as sent,
        coalesce(epoch_us(ended_at), case when gone.task_id is not null then epoch_us(coalesce(
            started_at, received_at, sent_at)) end) as ended
    from {ANY_TIME} one left join gone on one.task_id = gone.task_id and one.attempt = gone.attempt
), change as (
    select queue, sent // 1000000 as second, 1 as waiting, 0 as running, 1 as n_sent, 0 as n_started,
        0 as n_ended
    from attempt where sent is not null
    union all
    select queue, coalesce(started, ended) // 1000000, -1, (started is not null)::int, 0,
        (started is not null)::int, 0
    from attempt where sent is not null and coalesce(started, ended) is not null
    union all
    select queue, ended // 1000000, 0, -(started is not null)::int, 0, 0, 1
    from attempt where sent is not null and ended is not null
), second as (
    select queue, second, sum(waiting) as waiting, sum(running) as running, sum(n_sent) as n_sent,
        sum(n_started) as n_started, sum(n_ended) as n_ended
    from change group by queue, second
), level as (
    select queue, second, n_sent, n_started, n_ended, waiting, sum(waiting) over past as depth,
        sum(running) over past as running
    from second window past as (partition by queue order by second rows unbounded preceding)
), minute as (
    select queue, second // 60 as minute, sum(n_sent) as n_sent, sum(n_started) as n_started,
        sum(n_ended) as n_ended, arg_max(depth, second) as depth,
        max(greatest(depth, depth - waiting)) as depth_max,
        arg_max(running, second) as running, max(running) as running_max
    from level group by queue, minute
), waited as (
    select queue, started // 60000000 as minute, {percentiles("wait_s", "wait_p{}_s", (50, 95))},
        max(wait_s) as wait_max_s
    from attempt where started is not null group by queue, minute
)
select to_timestamp(minute.minute * 60) as minute, minute.queue, n_sent::bigint as n_sent,
    n_started::bigint as n_started, n_ended::bigint as n_ended, greatest(depth, 0)::bigint as depth,
    greatest(depth_max, 0)::bigint as depth_max, greatest(running, 0)::bigint as running,
    greatest(running_max, 0)::bigint as running_max, wait_p50_s, wait_p95_s, wait_max_s,
    case when depth <= 0 then 0.0 when n_started > 0 then depth * 60.0 / n_started end as backlog_s
from minute left join waited
    on minute.minute = waited.minute and minute.queue is not distinct from waited.queue"""

QUEUES = View(
    Table(
        "queues",
        "Per minute and queue: what came, what waited, what ran. Only minutes in which something changed:"
        " what `depth` and `running` say holds until the next row of that queue.",
        ("minute", "queue"),
        (
            sure("minute", "instant", "the minute"),
            TableColumn("queue", "text", "the queue; null if unknown (`task_send_sent_event` is off)"),
            sure("n_sent", "int", "attempts that came to the queue: sent and due (else received)"),
            sure("n_started", "int", "attempts that started"),
            sure("n_ended", "int", "attempts that ended, with any outcome"),
            sure("depth", "int", "attempts that waited at the end of the minute"),
            sure("depth_max", "int", "most that waited at the beginning or the end of a second of it"),
            sure("running", "int", "attempts that ran at the end of the minute"),
            sure("running_max", "int", "most that ran at the end of a second of it"),
            TableColumn("wait_p50_s", "float", "half of those that started had waited at most this long"),
            TableColumn("wait_p95_s", "float", "95 % of those that started had waited at most this long"),
            TableColumn("wait_max_s", "float", "the longest wait of those that started"),
            TableColumn(
                "backlog_s",
                "float",
                "seconds that the depth would take at the minute's rate of starts; null if none started",
            ),
        ),
    ),
    _QUEUES_SQL,
)


# ---- workflows -------------------------------------------------------------------------------------
#
# A workflow is a task and all tasks that it sent, directly or indirectly. The critical path ends with the
# task that ended last, and leads back from each task to its sender. The slowest part of a chord sends the
# body, so the path leads through that part. Each second on the path belongs to one of four kinds: the next
# task was not sent or not due, it waited in its queue, an attempt failed, or it ran. A task that keeps
# running after it has sent the next task is on the path until the sending. A task without a task-sent event
# (a follow-up that a worker sends, or `task_send_sent_event` is off) counts as sent at the end of its
# parent, or when it was received if that is earlier. The end of a task is the time that its process reports;
# Celery workers report the time at which they notice it. If the clocks of machines differ, no duration is
# negative, but the four kinds need not add up to the total duration.

PATH_MAX = 1000
"""Limit of tasks on a path; of a longer path, the last tasks are used. The limit also ends cycles of
parents, which only an incorrect sender reports.
"""

OF_PART = "workflows_of_part"
"""The macro for one part of the workflows. The recursion needs memory for each workflow, so large histories
are processed in parts.
"""

_WORKFLOWS_SQL = f"""
with recursive root as materialized (
    select distinct hash(root_id) as root from tasks
    where root_id is not null and root_id <> task_id and hash(root_id) % parts = part
), task as materialized (
    select hash(root_id) as root, hash(task_id) as id, hash(nullif(parent_id, task_id)) as parent, root_id,
        task_id, name, queue, state, retries,
        epoch_us(first_sent_at) as sent,
        epoch_us(coalesce(first_sent_at, first_received_at, first_started_at)) as seen,
        epoch_us(try_cast(eta as timestamptz)) as eta,
        epoch_us(first_started_at) as first_start,
        epoch_us(started_at) as last_start,
        case when state in {ENDED} then epoch_us(state_at) end as ended
    from (select * replace (coalesce(root_id, task_id) as root_id) from {ANY_TASKS}) one
        semi join root on root.root = hash(one.root_id)
), last as (
    select root, max({{'ended': ended, 'seen': coalesce(seen, 0), 'id': id}}).id as id
    from task where ended is not null group by root
), climbed as (
    select root, id, 0 as up, parent, sent, seen, null::bigint as next_sent
    from task semi join last using (root, id)
    union all
    select task.root, task.id, up + 1, task.parent, task.sent, task.seen,
        coalesce(climbed.sent, least(climbed.seen, task.ended)) as next_sent
    from climbed join task on task.root = climbed.root and task.id = climbed.parent
    where up < {PATH_MAX - 1}
), placed as materialized (
    select root, id, min(up) as up, arg_min_null(next_sent, up) as next_sent from climbed group by root, id
), step as (
    select root, placed.next_sent, eta, first_start, last_start,
        coalesce(sent, above.next_sent, seen) as sent,
        greatest(coalesce(sent, above.next_sent, seen), least(ended, placed.next_sent)) as leaves
    from placed join task using (root, id)
        left join (select root, up - 1 as up, next_sent from placed) above using (root, up)
), due as (
    select *, case when eta > sent and eta <= coalesce(first_start, leaves) then least(eta, leaves) else sent
        end as due
    from step
), started as (
    select *, least(greatest(coalesce(first_start, leaves), due), leaves) as first from due
), again as (
    select *, least(greatest(coalesce(last_start, first), first), leaves) as last from started
), path as (
    select root, count(*) as n_path, sum(first - due) / 1e6 as queue_s, sum(leaves - last) / 1e6 as run_s,
        sum(last - first) / 1e6 as retry_s,
        sum(due - sent + greatest(coalesce(next_sent - leaves, 0), 0)) / 1e6 as follow_s
    from again group by root
), named as (
    select root, to_json(list(task_id order by up desc)) as path,
        string_agg(coalesce(name, '?'), ' → ' order by up desc) as path_names
    from placed join task using (root, id) group by root
), tree as (
    select root, any_value(root_id) as root_id, any_value(name) filter (id = root) as name,
        any_value(queue) filter (id = root) as queue, count(*) as n_tasks,
        count(*) filter (state = 'FAILURE') as n_failed, count(*) filter (retries > 0) as n_retried,
        count(*) filter (ended is null) as n_open, min(seen) as began, max(ended) as ended
    from task group by root
)
select root_id, name, queue, n_tasks, n_failed, n_retried, n_open, make_timestamptz(began) as began_at,
    make_timestamptz(ended) as ended_at,
    case when ended is not null then greatest(ended - began, 0) / 1e6 end as duration_s,
    path::varchar as path, path_names, n_path, queue_s, run_s, retry_s, follow_s
from tree left join path using (root) left join named using (root)"""
"""Ids are compared by their hashes, which need a third of the memory. A task is identified by the hashes of
its own id and its root's id. `next_sent` is the time at which the next task on the path was sent.
"""

WORKFLOWS = View(
    Table(
        "workflows",
        "One row for each task that led to others, with the whole tree below it.",
        ("root_id",),
        (
            sure("root_id", "text", "the first task of the workflow"),
            TableColumn("name", "text", "its name; null if it was not recorded"),
            TableColumn("queue", "text", "where it was sent to"),
            sure("n_tasks", "int", "tasks in the tree, the first included"),
            sure("n_failed", "int", "of them failed"),
            sure("n_retried", "int", "were tried more than once"),
            sure("n_open", "int", "have not ended"),
            TableColumn("began_at", "instant", "when the first was sent (else received)"),
            TableColumn("ended_at", "instant", "when the last of those ended that have"),
            TableColumn("duration_s", "float", "seconds between the two"),
            TableColumn(
                "path",
                "json",
                f"ids on the critical path, first to last, at most {PATH_MAX}; null if none ended",
            ),
            TableColumn("path_names", "text", "their names, joined by ` → `"),
            TableColumn("n_path", "int", "tasks on the critical path"),
            TableColumn(
                "queue_s", "float", "on the path: seconds in which a task was due and had not started"
            ),
            TableColumn("run_s", "float", "on the path: seconds in which the last attempts ran"),
            TableColumn(
                "retry_s",
                "float",
                "on the path: seconds from a task's first start to its last one: attempts in vain and the"
                " waits after them",
            ),
            TableColumn(
                "follow_s",
                "float",
                "on the path: seconds in which the next task was not sent yet, or not due (countdown, eta);"
                " the first countdown of a task that was retried is not known and counts as `queue_s`",
            ),
        ),
    ),
    f"select * from {OF_PART}(0, 1)",
    first=f"create macro {OF_PART}(part, parts) as table {_WORKFLOWS_SQL}",
)


# ---- lost time -------------------------------------------------------------------------------------
#
# The time that each task lost because of failed attempts and repeated starts. An attempt that ends in a
# failure or a retry is lost. If the same attempt starts again, because its worker died or its message was
# delivered twice, the time before its last start is lost.

_LOST_TIME_SQL = """
with attempt as (
    select task_id, attempt, name, queue, state_at, outcome, run_s, n_deliveries, started_at, ended_at
    from attempts
), troubled as materialized (
    select distinct task_id from attempt
    where outcome in ('FAILURE', 'RETRY') or attempt > 0 or n_deliveries > 1
), tried as (
    select *, epoch_us(started_at) - lag(epoch_us(ended_at)) over (
            partition by task_id order by attempt
        ) as between_us
    from attempt semi join troubled using (task_id)
), repeated as (
    select task_id, sum(again_us) / 1e6 as repeated_s, sum(starts - 1) as n_repeats from (
        select task_id, count(*) as starts, max(epoch_us(timestamp)) - min(epoch_us(timestamp)) as again_us
        from timeline semi join (select task_id from attempt where n_deliveries > 1) using (task_id)
        where type = 'task-started' group by task_id, attempt having count(*) > 1
    ) group by task_id
), summed as (
    select task_id, any_value(name) as name, any_value(queue) as queue, max(state_at) as last_at,
        arg_max(outcome, attempt) as outcome, count(*) as n_attempts,
        count(*) filter (outcome in ('FAILURE', 'RETRY')) as n_failed,
        coalesce(sum(run_s) filter (outcome in ('FAILURE', 'RETRY')), 0) as failed_s,
        coalesce(sum(greatest(between_us, 0)), 0) / 1e6 as again_s
    from tried group by task_id
)
select task_id, name, queue, last_at, outcome, n_attempts, n_failed,
    coalesce(n_repeats, 0)::bigint as n_repeats,
    failed_s, again_s, coalesce(repeated_s, 0) as repeated_s,
    failed_s + again_s + coalesce(repeated_s, 0) as lost_s
from summed left join repeated using (task_id)
where n_failed > 0 or n_attempts > 1 or n_repeats > 0"""

LOST_TIME = View(
    Table(
        "lost_time",
        "One row for each task that lost time to attempts in vain or to repeats.",
        ("task_id",),
        (
            sure("task_id", "text", "the task's id"),
            TableColumn("name", "text", "the task's name"),
            TableColumn("queue", "text", "where it was sent to"),
            TableColumn("last_at", "instant", "when its last attempt entered its state"),
            TableColumn("outcome", "text", "how its last attempt ended; null before that"),
            sure("n_attempts", "int", "its attempts"),
            sure("n_failed", "int", "attempts that ended in a failure or a retry"),
            sure("n_repeats", "int", "starts of an attempt that had started before"),
            sure("failed_s", "float", "seconds that attempts ran which ended in a failure or a retry"),
            sure(
                "again_s",
                "float",
                "seconds from the end of an attempt to the start of the next, countdown included",
            ),
            sure(
                "repeated_s",
                "float",
                "seconds from the first to the last start of an attempt that started again",
            ),
            sure("lost_s", "float", "the sum of the three"),
        ),
    ),
    _LOST_TIME_SQL,
)


# ---- unusual ---------------------------------------------------------------------------------------
#
# Steps of time in which a task ran more or less often, ran longer, or waited longer than usual. The usual
# value is the median over all steps, and deviations are measured in median absolute deviations (MAD),
# because a few extreme steps do not change a median. A step is unusual if it deviates by more than five
# standard deviations. A rate must also deviate more than a random count does (the root of its Poisson
# deviance: with twelve as usual, none may be chance), and a duration by more than a fifth of the usual
# value. Limits: a task needs at least `STEPS_MIN` steps; a task that is idle in most steps has no usual
# rate; a step needs `SAMPLES_MIN` attempts for a duration. The period cuts off the first and the last step,
# so their rates are ignored. A change that lasts for more than half of the history becomes the usual value.

STEP_S = 600
STEPS_MIN = 8
SAMPLES_MIN = 5
FAR = 5.0
MAD_TO_DEVIATION = 1.4826
"""The ratio of the standard deviation to the MAD for normally distributed values."""

_UNUSUAL_SQL = f"""
with recorded as (
    select min(epoch(recorded_at)) - 86400 as first, max(epoch(recorded_at)) + 86400 as last from timeline
), sample as (
    select name, floor(epoch(ended_at) / step_s)::bigint as step, wait_s, run_s from attempts, recorded
    where ended_at is not null and name is not null
        and epoch(ended_at) between coalesce(first, -1e18) and coalesce(last, 1e18)
), step as materialized (
    select name, step, count(*) as n, median(wait_s) as wait_s, median(run_s) as run_s,
        count(wait_s) as n_wait, count(run_s) as n_run
    from sample group by name, step
), span as (
    select name, min(step) as first, max(step) as last, count(*) as steps from step group by name
), measured as (
    select name, step, 'run' as what, run_s as value, n from step where n_run >= {SAMPLES_MIN}
    union all
    select name, step, 'wait', wait_s, n from step where n_wait >= {SAMPLES_MIN}
    union all
    select every.name, every.step, 'rate', coalesce(n, 0)::double, coalesce(n, 0)
    from (
        select name, unnest(range(first + 1, last)) as step from span where last - first + 1 <= 2 * steps
    ) every left join step on every.name = step.name and every.step = step.step
), usual as (
    select name, what, median(value) as usual, mad(value) as mad from measured
    group by name, what having count(*) >= {STEPS_MIN}
), judged as (
    select measured.*, usual, greatest(
            {MAD_TO_DEVIATION} * mad,
            case what when 'rate' then 0 else greatest(usual / {FAR} / {FAR}, 1e-3) end
        ) as deviation,
        case what when 'rate' then sqrt(2 * greatest(
            case when value > 0 then value * ln(value / greatest(usual, 0.5)) else 0 end - (value - usual), 0
        )) end as chance
    from measured join usual using (name, what)
), scored as (
    select *, sign(value - usual) * least(abs(value - usual) / nullif(deviation, 0), chance) as score
    from judged
)
select to_timestamp(step * step_s) as step_at, name, what, n, value, usual, deviation, score,
    case what
        when 'rate' then format('{{}}: {{:,}} attempts ended in the {{:g}} min from {{}}, usually {{:g}}',
            name, value::bigint, step_s / 60.0,
            strftime(to_timestamp(step * step_s), '%Y-%m-%d %H:%M'), usual)
        else format('{{}}: half of the attempts in the {{:g}} min from {{}} {{}} longer than {{:.3g}} s,'
            || ' usually {{:.3g}} s',
            name, step_s / 60.0, strftime(to_timestamp(step * step_s), '%Y-%m-%d %H:%M'),
            case what when 'run' then 'ran' else 'waited' end, value, usual)
    end as detail
from scored where abs(score) > {FAR}"""

UNUSUAL = View(
    Table(
        "unusual",
        f"One row for each step of time in which a task's rate, run or waiting time was far from the usual."
        f" `select * from unusual()`; `step_s` is the length of a step, {STEP_S} unless said:"
        " `unusual(step_s := 3600)`.",
        ("step_at", "name", "what"),
        (
            sure("step_at", "instant", "the beginning of the step"),
            sure("name", "text", "the task's name"),
            sure("what", "text", "rate: attempts that ended; run, wait: the median of their seconds"),
            sure("n", "int", "attempts that ended in the step"),
            sure("value", "float", "the step's figure"),
            sure("usual", "float", "the median over all steps"),
            sure(
                "deviation",
                "float",
                "how far steps usually are from it: 1.4826 × the median of the absolute deviations; for a"
                " duration at least 1/25 of the usual and 1 ms",
            ),
            sure(
                "score",
                "float",
                "(value − usual) / deviation; for a rate no more than the signed root of the Poisson"
                f" deviance, which is how far chance would have to go. A row is there beyond ±{FAR:g}",
            ),
            sure("detail", "text", "the same in a sentence"),
        ),
    ),
    _UNUSUAL_SQL,
    (f"step_s := {STEP_S}",),
)


# ---- compared --------------------------------------------------------------------------------------
#
# The figures of each task in two periods. An attempt belongs to the period in which it ended.

MEASURES = tuple(f"{what}_{share}_s" for what in ("wait", "run") for share in ("p50", "p95"))
_SIDES = ("before", "after")


def _figures(side: str) -> str:
    """Return the SQL for the figures of one period."""
    waits, runs = (
        percentiles(f"{what}_s", f"{what}_p{{}}_s_{side}", (50, 95), where=side) for what in ("wait", "run")
    )
    return f"""count(*) filter ({side}) as n_{side},
    count(*) filter ({side} and outcome = 'FAILURE') as failed_{side},
    count(*) filter ({side} and outcome = 'FAILURE')
        / nullif(count(*) filter ({side} and outcome in ('SUCCESS', 'FAILURE')), 0) as failure_rate_{side},
    {waits}, {runs}"""


_CHANGES = ", ".join(
    f"{figure}_after / nullif({figure}_before, 0) - 1 as {figure}_change" for figure in ("n", *MEASURES)
)

_COMPARED_SQL = f"""
with attempt as (
    select *, ended_at >= before_since and ended_at < before_until as before,
        ended_at >= after_since and ended_at < after_until as after
    from attempts
    where ended_at >= least(before_since, after_since) and ended_at < greatest(before_until, after_until)
), figure as (
    select name, {", ".join(map(_figures, _SIDES))}
    from attempt where before or after group by name
)
select *, {_CHANGES}, failure_rate_after - failure_rate_before as failure_rate_change from figure"""


def _of(side: str) -> tuple[TableColumn, ...]:
    """Return the columns of one period."""
    period = "first" if side == "before" else "second"
    return (
        sure(f"n_{side}", "int", f"attempts that ended in the {period} period"),
        sure(f"failed_{side}", "int", "of them failed"),
        TableColumn(
            f"failure_rate_{side}", "float", "failed of those that succeeded or failed; null if neither"
        ),
        *(
            TableColumn(f"{what}_{share}_s_{side}", "float", f"{part} {verb} at most this long")
            for what, verb in (("wait", "waited"), ("run", "ran"))
            for share, part in (("p50", "half"), ("p95", "95 %"))
        ),
    )


COMPARED = View(
    Table(
        "compared",
        "One row per task name: its figures in a first and in a second period. `select * from"
        " compared(before_since, before_until, after_since, after_until)` with four instants; the ends are"
        " not part of the periods.",
        ("name",),
        (
            TableColumn("name", "text", "the task's name"),
            *_of("before"),
            *_of("after"),
            *(
                TableColumn(
                    f"{figure}_change",
                    "float",
                    "after / before − 1: 0.5 is half as much again; null without both",
                )
                for figure in ("n", *MEASURES)
            ),
            TableColumn("failure_rate_change", "float", "after − before"),
        ),
    ),
    _COMPARED_SQL,
    ("before_since", "before_until", "after_since", "after_until"),
)


# ---- views -----------------------------------------------------------------------------------------

VIEWS: Mapping[str, View] = {
    view.table.name: view for view in (WORKFLOWS, QUEUES, LOST_TIME, UNUSUAL, COMPARED)
}
"""All views by name, in the order of their creation."""
