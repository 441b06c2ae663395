"""Lost time: what attempts in vain and repeats have cost each task.

An attempt is in vain when it ends in a failure or a retry. A repeat is the same attempt started again,
because its worker died or its message was delivered twice: what came before the last start is lost.
"""

from umbel.events.tables import Table, TableColumn
from umbel.history.views.view import View, sure

_SQL = """
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
    _SQL,
)
