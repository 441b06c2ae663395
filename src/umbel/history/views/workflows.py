"""Workflows: the tasks that one task led to, and where the time went until the last of them had ended.

The critical path ends with the task that ended last and goes back through the task that sent each. A
chord's body is sent by the part that ended last, so the path runs through the slowest part. On the path
every second belongs to one of four: the next task was not sent or not due, it waited in its queue, it was
tried in vain, or it ran. A task that sends the next one and runs on is on the path until it has sent it.

A task was sent by the end of its parent at the latest. Where nobody told that it was sent (follow-ups that a
worker sends, `task_send_sent_event` is off), it counts as sent then, or when it was received before that.

A task ended when its process says so; Celery's workers tell when they heard of it. Where clocks of machines
differ, no part is less than nothing, and the parts need not add up to the duration.
"""

from umbel.events.tables import Table, TableColumn
from umbel.history.views.view import ANY_TASKS, ENDED, View, sure

PATH_MAX = 1000
"""Tasks on a path; of a longer one the last are kept. It also ends a circle of parents, which no honest
sender reports."""

OF_PART = "workflows_of_part"
"""The same of the workflows that fall into one of so many parts: what climbs needs memory by their number."""

_SQL = f"""
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
"""Ids are compared by their hashes, which need a third of the memory. A task is found by its own and its
root's together. `next_sent`: when the next task on the path was sent."""

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
    first=f"create macro {OF_PART}(part, parts) as table {_SQL}",
)
