"""Unusual: times in which a task ran more or less often, longer, or waited longer than it usually does.

The usual is the median over all steps, and what deviates is measured by the median of the deviations (MAD),
which a few wild steps cannot move. A step is unusual when it is farther away than five standard deviations
would be. A rate must also be farther away than chance moves a count (the root of its Poisson deviance: none
where twelve are usual may be chance), and a duration farther than a fifth of the usual.

Where it is silent: a task that is there in fewer than `STEPS_MIN` steps; one that is idle in most steps has
no usual rate; a step with fewer than `SAMPLES_MIN` attempts has no duration. The first and the last step
are cut off by the period, so their rate is not judged. A change that lasts for more than half of the
history is the usual.
"""

from umbel.events.tables import Table
from umbel.history.views.view import View, sure

STEP_S = 600
STEPS_MIN = 8
SAMPLES_MIN = 5
FAR = 5.0
MAD_TO_DEVIATION = 1.4826
"""The standard deviation of normal values, in medians of the absolute deviations."""

_SQL = f"""
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
    _SQL,
    (f"step_s := {STEP_S}",),
)
