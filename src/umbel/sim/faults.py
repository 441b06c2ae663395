"""Faults: what each kind of fault in a plan does to a crowd, and how it ends."""

from collections.abc import Callable
from typing import Any

from umbel.sim.crowd import Crowd
from umbel.sim.plan import POINTS, STORM_S, WINDOWS, Fault

AnyCrowd = Crowd[Any]
STOPPING_S = 3.0  # how long a node that stops gracefully goes on with what acts


def schedule_faults(crowd: AnyCrowd) -> None:
    """Put the faults of the plan into the world, and the end of all of them."""
    for fault in crowd.plan.faults:
        if fault.kind not in ("skew", "drift"):  # these are so from the beginning
            crowd.world.at(fault.at_s, _begin, crowd, fault)
    crowd.world.at(STORM_S, crowd.heal)


def _begin(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.count(f"fault {fault.kind}")
    crowd.world.trace.note(f"{crowd.world.now:.6f} fault {fault.kind} {fault.node}")
    if fault.kind in POINTS:
        crowd.armed.setdefault(fault.kind, []).append(fault)
    elif fault.kind in WINDOWS:
        _set_weather(crowd, fault, fault.amount)
        crowd.world.after(fault.lasts_s, _set_weather, crowd, fault, 0.0)
    else:
        _ACTIONS[fault.kind](crowd, fault)


def _set_weather(crowd: AnyCrowd, fault: Fault, amount: float) -> None:
    weather = crowd.network.calls if fault.kind.startswith("store-") else crowd.network.broadcasts
    match fault.kind.removeprefix("store-"):
        case "loss":
            weather.lost = amount
        case "duplicate":
            weather.doubled = amount
        case _:
            weather.delayed = amount


def _crash(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.crash(fault.node)
    crowd.world.after(fault.lasts_s, crowd.restart, fault.node)


def _stop(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.nodes[fault.node].stop()
    crowd.world.after(STOPPING_S, _crash, crowd, fault)


def _pause(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.nodes[fault.node].pause(fault.lasts_s)


def _partition(crowd: AnyCrowd, fault: Fault) -> None:
    """A third each: away from the broadcasts, from the store, from both."""
    network = crowd.network
    cut = [network.broadcasts] * (fault.amount < 0.67) + [network.calls] * (fault.amount > 0.33)
    for weather in cut:
        weather.cut_off.add(fault.node)
        crowd.world.after(fault.lasts_s, weather.cut_off.discard, fault.node)


def _outage(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.set_store_down(True)
    crowd.world.after(fault.lasts_s, crowd.set_store_down, False)


def _forget(crowd: AnyCrowd, _fault: Fault) -> None:
    crowd.empty_store()


def _jump(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.set_skew(fault.node, fault.amount)


def _false_lost(crowd: AnyCrowd, fault: Fault) -> None:
    crowd.take_for_lost(fault.node)


_ACTIONS: dict[str, Callable[[AnyCrowd, Fault], None]] = {
    "crash": _crash,
    "stop": _stop,
    "pause": _pause,
    "partition": _partition,
    "store-outage": _outage,
    "amnesia": _forget,
    "wall-jump": _jump,
    "false-lost": _false_lost,
}
