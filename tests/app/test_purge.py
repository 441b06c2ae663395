"""`app.control.purge`: waiting messages are removed, from queues that are named or those of the app."""

import asyncio

from umbel import App


def test_the_queues_of_the_apps_tasks_are_emptied(app: App) -> None:
    plain, slow = app.task(name="plain")(lambda: None), app.task(name="slow", queue="slow")(lambda: None)
    for _ in range(2):
        plain.delay()
        slow.delay()
        plain.apply_async(queue="other", countdown=600)
    assert app.control.purge() == 4
    assert app.control.purge("slow", "other") == 2
    assert asyncio.run(app.control.aio.purge()) == 0
