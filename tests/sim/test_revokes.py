"""Revokes among hosts whose clocks are a day apart and that were started minutes or months ago (S2, S3)."""

from random import Random

import pytest

from umbel.protocol.delivery.revoked import HEARSAY_S, RevokedTasks, hello, take_in
from umbel.sim.world import NodeClock, World

DAY_S = 86_400.0
HOURS_S = 3600.0
TASKS = 20


class Host:
    def __init__(self, name: str, clock: NodeClock) -> None:
        self.name = name
        self.clock = clock
        self.revoked = RevokedTasks()

    def wall_s(self, world: World) -> float:
        return self.clock.read(world.now).wall_s


def celery_56(host: Host, world: World) -> dict[str, object]:
    """Its hello carries stamps of the time since its machine was started, renewed at every merge."""
    return {"revoked": {task: [host.clock.read(world.now).boot_s, task] for task in host.revoked}}


def exchange(hosts: list[Host], world: World, chance: Random, *, restamper: Host | None) -> None:
    """Every host says hello to all others, in any order, twice: so that all have heard of everything."""
    for one in 2 * chance.sample(hosts, len(hosts)):
        say = hello(one.name, one.revoked, one.wall_s(world))
        said = celery_56(one, world) if one is restamper else say
        for other in hosts:
            if other is not one:
                take_in(said, other.revoked, other.wall_s(world))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("with_celery", [False, True])
def test_no_revoke_is_lost_or_immortal(seed: int, with_celery: bool) -> None:
    world, chance = World(f"revokes {seed}"), Random(seed)
    hosts = [
        Host("a@sim", NodeClock(boot_s=120.0, skew_s=-DAY_S)),
        Host("b@sim", NodeClock(boot_s=90 * DAY_S, skew_s=DAY_S)),
        Host("c@sim", NodeClock(boot_s=5000.0, rate=1.0001)),
    ]
    revoked_at: dict[str, float] = {}
    while world.now < 14 * HOURS_S:
        world.run(world.now + chance.uniform(60.0, 600.0))
        if len(revoked_at) < TASKS:
            task, host = f"t{len(revoked_at)}", chance.choice(hosts)
            host.revoked.learn(task, 0.0, host.wall_s(world))
            revoked_at[task] = world.now
        for host in hosts:
            host.revoked.expire(host.wall_s(world))
        exchange(hosts, world, chance, restamper=hosts[1] if with_celery else None)
        for task, at in revoked_at.items():
            age_s = world.now - at
            holders = [host.name for host in hosts if task in host.revoked]
            if age_s < HEARSAY_S * 0.99:
                assert len(holders) == len(hosts), f"{task} is lost after {age_s:.0f} s but for {holders}"
            if age_s > HEARSAY_S * 2.2:
                assert holders == [], f"{task} lives on after {age_s:.0f} s in {holders}"
    assert len(revoked_at) == TASKS
