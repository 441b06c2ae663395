"""Faults: what each kind of fault in a plan does to the cluster, and how it ends."""

from collections.abc import Callable

from umbel.protocol.election_events import HolderLost
from umbel.sim.cluster import Cluster
from umbel.sim.network import Weather
from umbel.sim.plan import POINTS, STORM_S, WINDOWS, Fault

STOPPING_S = 3.0  # how long a node that stops gracefully goes on with what acts


def schedule_faults(cluster: Cluster) -> None:
    """Put the faults of the plan into the world, and the end of all of them."""
    for fault in cluster.plan.faults:
        if fault.kind not in ("skew", "drift"):  # these are so from the beginning
            cluster.world.at(fault.at_s, _begin, cluster, fault)
    cluster.world.at(STORM_S, _end_all, cluster)


def _begin(cluster: Cluster, fault: Fault) -> None:
    cluster.count(f"fault {fault.kind}")
    cluster.world.trace.note(f"{cluster.world.now:.6f} fault {fault.kind} {fault.node}")
    if fault.kind in POINTS:
        cluster.armed.setdefault(fault.kind, []).append(fault)
    elif fault.kind in WINDOWS:
        _set_weather(cluster, fault, fault.amount)
        cluster.world.after(fault.lasts_s, _set_weather, cluster, fault, 0.0)
    else:
        _ACTIONS[fault.kind](cluster, fault)


def _end_all(cluster: Cluster) -> None:
    cluster.network.broadcasts = Weather()
    cluster.network.calls = Weather()
    cluster.store.down = False
    cluster.heal()


def _set_weather(cluster: Cluster, fault: Fault, amount: float) -> None:
    weather = cluster.network.calls if fault.kind.startswith("store-") else cluster.network.broadcasts
    match fault.kind.removeprefix("store-"):
        case "loss":
            weather.lost = amount
        case "duplicate":
            weather.doubled = amount
        case _:
            weather.delayed = amount


def _crash(cluster: Cluster, fault: Fault) -> None:
    cluster.crash(fault.node)
    cluster.world.after(fault.lasts_s, cluster.restart, fault.node)


def _stop(cluster: Cluster, fault: Fault) -> None:
    cluster.nodes[fault.node].stop()
    cluster.world.after(STOPPING_S, _crash, cluster, fault)


def _pause(cluster: Cluster, fault: Fault) -> None:
    cluster.nodes[fault.node].pause(fault.lasts_s)


def _partition(cluster: Cluster, fault: Fault) -> None:
    """A third each: away from the broadcasts, from the store, from both."""
    network = cluster.network
    cut = [network.broadcasts] * (fault.amount < 0.67) + [network.calls] * (fault.amount > 0.33)
    for weather in cut:
        weather.cut_off.add(fault.node)
        cluster.world.after(fault.lasts_s, weather.cut_off.discard, fault.node)


def _outage(cluster: Cluster, fault: Fault) -> None:
    cluster.store.down = True
    cluster.world.after(fault.lasts_s, _end_outage, cluster)


def _end_outage(cluster: Cluster) -> None:
    cluster.store.down = False


def _forget(cluster: Cluster, _fault: Fault) -> None:
    cluster.store.forget_everything()


def _jump(cluster: Cluster, fault: Fault) -> None:
    cluster.clock(fault.node).jump(fault.amount)


def _false_lost(cluster: Cluster, fault: Fault) -> None:
    lost = cluster.nodes[fault.node].holder
    for node in cluster.nodes:
        node.hear(HolderLost(lost))


_ACTIONS: dict[str, Callable[[Cluster, Fault], None]] = {
    "crash": _crash,
    "stop": _stop,
    "pause": _pause,
    "partition": _partition,
    "store-outage": _outage,
    "amnesia": _forget,
    "wall-jump": _jump,
    "false-lost": _false_lost,
}
