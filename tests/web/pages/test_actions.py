"""Each action is clicked, its replies are read, and its effect is seen in the cluster."""

from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from tests.web.pages.shop import DEADLINE_S, Shop, open_shop
from umbel.brokers.interface import Depth


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with open_shop(
        tmp_path_factory.mktemp("actions"), "apple", "birch", "cedar", worker_pool_restarts=True
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def no_errors(shop: Shop) -> Iterator[None]:
    shop.errors.clear()
    yield
    assert shop.errors == []


def node(shop: Shop, name: str) -> str:
    return next(one.node for one in shop.served.dashboard.cluster.nodes() if one.node.startswith(f"{name}@"))


def depth(shop: Shop, queue: str) -> Depth | None:
    return shop.served.dashboard.feed.queues.get(queue)


def test_failed_tasks_are_retried_one_by_one_or_all_that_match(shop: Shop) -> None:
    ids = [shop.send("shop.pay", f"order-{number}") for number in range(3)]
    shop.wait_for(*ids)
    page = shop.open("/tasks?state=FAILURE&name=shop.pay")
    page.locator(f"tr[data-task='{ids[0]}'] input[data-pick]").check()
    assert page.locator("[data-picked]").inner_text() == "1"
    question = shop.confirm(page.locator("#picking button[value=retry]"))
    assert question == "Retry 1 task?"
    shop.until(page.locator("[data-total='4']"), "the task that was sent again to fail")
    sent = page.locator("#replies a.mono").inner_text()
    assert shop.args_of(sent) == shop.args_of(ids[0])
    page = shop.open("/tasks?state=FAILURE&name=shop.pay&text=order-2")
    assert (
        shop.confirm(page.get_by_role("button", name="Retry all")) == "Retry 1 task that matches the filter?"
    )
    shop.until(page.locator("[data-total='2']"), "it to fail again")


def test_a_task_that_runs_is_terminated_and_one_that_waits_is_revoked(shop: Shop) -> None:
    gate = shop.cluster.home / "terminate"
    running = shop.send("shop.pack", str(gate))
    shop.wait_for(running, state="PROGRESS")
    page = shop.open(f"/tasks/{running}")
    assert page.locator("progress").get_attribute("value") == "3"
    assert shop.confirm(page.get_by_role("button", name="Terminate")) == "Terminate 1 task?"
    shop.until(page.locator("#badge .state:has-text('revoked')"), "the task to end")
    shop.until(page.locator("#buttons:not(:has-text('Terminate'))"), "the actions that make no sense to go")
    waiting = shop.send("shop.add", 1, 1, queue="nobody")
    shop.wait_for(waiting, state="PENDING")
    page = shop.open(f"/tasks/{waiting}")
    shop.confirm(page.get_by_role("button", name="Revoke"))
    page = shop.open(f"/workers/{node(shop, 'birch')}")
    assert "nobody" in shop.do("add_queue", queue="nobody")
    shop.wait_for(waiting, state="REVOKED")


def test_a_pool_is_changed_and_each_change_has_its_replies(shop: Shop) -> None:
    name = node(shop, "apple")
    page = shop.open(f"/workers/{name}")
    shop.until(page.locator(".cell[data-pid]"), "its two child processes", count=2)
    assert name in shop.do("grow", n="2")
    shop.until(page.locator(".cell[data-pid]"), "two more child processes", count=4)
    wait_until(
        lambda: len(shop.cluster.children_of("apple")) == 4, deadline_s=DEADLINE_S, what="all four of them"
    )
    shop.do("shrink", n="1")
    wait_until(
        lambda: len(shop.cluster.children_of("apple")) == 3, deadline_s=DEADLINE_S, what="one process fewer"
    )
    assert name in shop.do("rate_limit", task="shop.add", rate="10/s")
    assert name in shop.do("time_limit", task="shop.add", soft="20", hard="30")
    assert "Autoscale not enabled" in shop.do("autoscale", done=False, min="1", max="3")
    before = set(shop.cluster.children_of("apple"))
    assert shop.confirm(page.get_by_role("button", name="Restart pool")) == f"Restart the pool {name}?"
    wait_until(
        lambda: not before & set(shop.cluster.children_of("apple")),
        deadline_s=DEADLINE_S,
        what="new processes",
    )


def test_queues_are_added_left_looked_into_and_purged(shop: Shop) -> None:
    name = node(shop, "apple")
    shop.open(f"/workers/{name}")
    shop.do("add_queue", queue="extra")
    shop.do("cancel_queue", queue="extra")
    page = shop.open(f"/workers/{name}")
    assert "extra" not in page.locator("#facts").inner_text()
    ids = [shop.send("shop.add", number, 2, queue="lonely") for number in range(3)]
    wait_until(
        lambda: (found := depth(shop, "lonely")) and found.ready == 3,
        deadline_s=DEADLINE_S,
        what="three messages",
    )
    page = shop.open("/queues")
    assert page.locator("tr[data-queue=lonely] [data-ready]").get_attribute("data-ready") == "3"
    assert "no consumer" in page.locator("tr[data-queue=lonely]").inner_text()
    page = shop.open("/queues/lonely")
    assert sorted(page.locator("#waiting a").all_inner_texts()) == sorted(ids)
    assert shop.confirm(page.get_by_role("button", name="Purge")) == "Purge the queue lonely?"
    wait_until(
        lambda: (found := depth(shop, "lonely")) is None or not found.ready,
        deadline_s=DEADLINE_S,
        what="no message",
    )


def test_a_queue_is_paused_emptied_into_another_and_resumed(shop: Shop) -> None:
    page = shop.open_queue("celery")
    assert shop.confirm(page.get_by_role("button", name="Pause")) == "Pause the queue celery?"
    shop.until(page.locator("#acts .state:has-text('paused')"), "the pause to be shown")
    ids = [shop.send("shop.add", number, 3) for number in range(3)]
    shop.until(page.locator("[data-figure=ready]:text-is('3')"), "three messages that wait")
    shop.until(page.locator("#waiting a"), "them in the list", count=3)
    page.locator("form[data-action=move_messages] [name=target]").fill("parking")
    page.locator("form[data-action=move_messages] [name=limit]").fill("2")
    question = shop.confirm(page.get_by_role("button", name="Move", exact=True))
    assert question == "Move 2 messages from celery to parking?"
    [parking] = [one for one in shop.command("queues", "ls") if one["queue"] == "parking"]
    assert (parking["ready"], parking["paused"]) == (2, False)
    page = shop.open("/queues")
    assert "paused" in page.locator("tr[data-queue=celery]").inner_text()
    page = shop.open_queue("parking")
    page.locator("form[data-action=move_messages] [name=target]").fill("celery")
    shop.confirm(page.get_by_role("button", name="Move", exact=True))
    page = shop.open_queue("celery")
    shop.do("resume_queue")
    shop.wait_for(*ids, state="SUCCESS")
    shop.until(page.get_by_role("button", name="Pause"), "the button to pause it again")


def test_dead_letters_are_grouped_requeued_and_dropped(shop: Shop) -> None:
    page = shop.open("/failures")
    for number in range(2):
        shop.send("shop.refuse", f"order-{number}")
    rows = page.locator("tr[data-letter]")
    shop.until(rows, "the dead letters", count=2)
    before = {one.get_attribute("data-letter") for one in rows.all()}
    page.locator("input[data-pick-all]").check()
    assert shop.confirm(page.locator("button[value=requeue_dead]")) == "Requeue 2 dead letters?"

    def refused_again() -> bool:
        shown = {
            one.get_attribute("data-letter")
            for one in shop.open("/failures").locator("tr[data-letter]").all()
        }
        return len(shown) == 2 and not shown & before

    wait_until(refused_again, deadline_s=DEADLINE_S, what="both to be refused again")
    assert shop.confirm(page.get_by_role("button", name="Drop all")) == "Drop all dead letters?"
    shop.until(page.locator("#letters:has-text('No dead letter')"), "an empty list")
    assert shop.command("dlq", "ls") == []


def test_dead_letters_that_a_command_drops_leave_the_page(shop: Shop) -> None:
    page = shop.open("/failures")
    shop.send("shop.refuse", "order-9")
    shop.until(page.locator("tr[data-letter]"), "the dead letter")
    [letter] = shop.command("dlq", "ls")
    shop.run("dlq", "drop", str(letter["id"]), "-y")
    shop.until(page.locator("#letters:has-text('No dead letter')"), "an empty list")


def test_periodic_tasks_run_now_and_can_be_paused(shop: Shop) -> None:
    page = shop.open("/schedule")
    row = page.locator("tr[data-periodic='nightly totals']")
    assert "nightly totals" in row.inner_text()
    assert "run periodic" in shop.do("run_periodic")
    sent = page.locator("#replies a.mono").inner_text()
    shop.wait_for(sent, state="SUCCESS")
    shop.do("pause_periodic")
    shop.until(page.locator("tr[data-periodic] .state:has-text('paused')"), "the pause to be shown")
    [listed] = shop.command("schedule", "ls")["tasks"]
    assert listed["paused"] == "yes"
    shop.do("resume_periodic")
    shop.until(page.locator("tr[data-periodic] .state:has-text('on')"), "the end of the pause")


def test_an_election_is_started_and_its_winner_shown(shop: Shop) -> None:
    page = shop.open("/elections")
    form = page.locator("form[data-action=start_election]")
    form.locator("[name=id]").fill("count-1")
    form.locator("[name=topic]").fill("stocktaking")
    shop.confirm(form.locator("button"))
    row = page.locator("tr[data-election='count-1']")
    shop.until(page.locator("tr[data-election='count-1']:has-text('@')"), "a winner")
    winner = row.locator("td").nth(1).inner_text()
    assert winner in {one.node for one in shop.served.dashboard.cluster.nodes()}
    assert "None" in page.locator("#broken").inner_text()


def test_a_mark_is_on_the_charts_and_everything_done_is_in_the_audit(shop: Shop) -> None:
    page = shop.open("/")
    shop.do("mark", text="v1.4 deployed")
    wait_until(lambda: [one.text for one in shop.served.dashboard.cluster.rates().marks], what="the mark")
    page = shop.open("/audit")
    [newest, *_] = page.locator("tr[data-audit]").all()
    assert "mark" in newest.inner_text() and "done" in newest.inner_text()
    done = {one.action for one in shop.served.dashboard.journal.audit(limit=1000)}
    shown = {one.inner_text().replace(" ", "_") for one in page.locator("tr[data-audit] td b").all()}
    assert shown == done >= {"mark"}


def test_a_killed_worker_is_seen_and_its_task_runs_again_for_a_reason(shop: Shop) -> None:
    gate = shop.cluster.home / "killed"
    held = shop.send("shop.pack", str(gate))
    shop.wait_for(held, state="PROGRESS")
    first = shop.served.dashboard.task(held)
    assert first is not None and first.task.worker
    victim = first.task.worker
    page = shop.open("/cluster")
    shop.cluster.kill_worker(victim.partition("@")[0])
    shop.until(page.locator(f".ring a[aria-label^='{victim}: lost']"), "the ring to show the loss")
    sentence = page.locator("#sentence:has-text('2 of 3 workers answer')")  # fetched apart from the ring
    shop.until(sentence, "the sentence to say so")
    assert victim in sentence.inner_text()
    page.locator("#ago").fill("3600")
    shop.until(page.locator("#ring:has-text('Replayed')"), "the replay")
    assert page.locator(f".ring a[aria-label^='{victim}: lost']").count() == 0
    page = shop.open(f"/tasks/{held}")
    shop.until(page.locator("#story .cause"), "the redelivery")
    gate.touch()
    shop.until(page.locator("#badge .state:has-text('succeeded')"), "its second run to end")
    page = shop.open(f"/tasks/{held}")
    assert page.locator("#story .cause").text_content() == f"redelivered: {victim} was lost"
    assert page.locator(".spacetime .lane-line.run").count() == 2
    assert page.locator(".spacetime .lane-line.run.again").count() == 1


def test_a_node_is_stopped_and_leaves(shop: Shop) -> None:
    alive = next(one.node for one in shop.served.dashboard.cluster.nodes() if one.state == "alive")
    page = shop.open(f"/workers/{alive}")
    assert shop.confirm(page.get_by_role("button", name="Stop node")) == f"Stop {alive}?"
    process = shop.cluster.workers[alive.partition("@")[0]]
    wait_until(lambda: process.poll() is not None, deadline_s=DEADLINE_S, what="the worker to end")
    page = shop.open("/cluster")
    shop.until(page.locator(f"tr[data-node='{alive}']:has-text('left')"), "the node that left")
