"""Queues: how much waited in each queue, how much ran, and how long the waiting took, minute by minute.

An attempt waits from when it was sent and due to its start. One of which neither start nor end was recorded
waits on, unless its task has ended or has a later attempt. Counted is at the ends of seconds.
"""

from umbel.events.tables import Table, TableColumn
from umbel.history.spelling import percentiles
from umbel.history.views.view import ANY_TASKS, ANY_TIME, ENDED, View, sure

_SQL = f"""
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
            TableColumn("queue", "text", "the queue; null if nobody said (`task_send_sent_event` is off)"),
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
    _SQL,
)
