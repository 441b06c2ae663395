"""What the worker reports about itself (`control.state.InspectionSection`)."""

import asyncio
import platform
import resource
from typing import Any
from urllib.parse import unquote, urlsplit

from umbel.brokers.links import MAILBOX
from umbel.urls import each_url, without_password
from umbel.version import VERSION
from umbel.worker.remote.parts import WorkerNode


class WorkerInspection(WorkerNode):
    def stats(self) -> dict[str, Any]:
        autoscaler, mailbox = self._parts.autoscaler, self._parts.mailbox
        links = self._context.outages.reconnects
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "total": dict(self._parts.tasks.totals),
            "pid": self.pid,
            "clock": str(self.clock.value),  # a text, as Celery has it
            "uptime": int(self.uptime_s),
            "prefetch_count": self._parts.tasks.claimed + self._context.pool.room(),
            "pool": self._pool_map(),
            "broker": broker_map(self._context.broker.url),
            "rusage": {name.removeprefix("ru_"): getattr(usage, name) for name in _USAGE},
            **({"autoscaler": autoscaler.describe()} if autoscaler.is_on else {}),
            "umbel": {
                "incarnation": self._context.identity.incarnation,
                "counters": self._context.counters.as_dict(),
                "links": {**links, MAILBOX: links[MAILBOX] + mailbox.resets},
                "outage": self._context.outages.problem,
                "replies_dropped": mailbox.replies_dropped,
                "unreadable": {
                    "events": self._parts.gossip.undecodable,
                    "requests": mailbox.malformed,
                },
                "requests_distrusted": mailbox.distrusted,
                "grants_unproven": self._context.broker.coordination.unproven,
                "stopping": self._context.shutdown.describe(asyncio.get_running_loop().time()),
                "steps": dict(self._parts.steps()),
            },
        }

    def health(self) -> dict[str, Any]:
        return {
            "problem": self._parts.tasks.problem,
            "claimed": self._parts.tasks.claimed,
            "stopping": self._context.shutdown.describe(asyncio.get_running_loop().time()),
            "queues": list(self._context.queues),
            "uptime_s": round(self.uptime_s, 1),
            "counters": self._context.counters.as_dict(),
        }

    def conf(self, *, with_defaults: bool) -> dict[str, Any]:
        shown, changed = self._context.settings.shown_settings, self._context.settings.changed_settings
        return {name: value for name, value in shown.items() if with_defaults or name in changed}

    def report(self) -> str:
        settings = "\n".join(f"{name}: {value!r}" for name, value in self.conf(with_defaults=False).items())
        return (
            f"\nsoftware -> umbel:{VERSION} py:{platform.python_version()}\n"
            f"platform -> system:{platform.system()} arch:{platform.machine()} "
            f"kernel version:{platform.release()}\n"
            f"broker -> {without_password(self._context.broker.url)}\n"
            f"pool -> {self._context.pool.describe()['implementation']}\n\n{settings}\n"
        )

    def _pool_map(self) -> dict[str, Any]:
        found = self._context.pool.describe()
        processes = found["processes"] or [self.pid]
        per_child = [f"{1 / len(processes):.2f}"] * len(processes)
        started = sum(self._parts.tasks.totals.values())
        return {
            **found,
            "implementation": f"umbel.pools.{found['implementation']}",
            "processes": processes,
            "max-tasks-per-child": found.get("max-tasks-per-child") or "N/A",
            "put-guarded-by-semaphore": False,
            "timeouts": [0, 0],
            "writes": {
                "total": started,
                "avg": per_child[0],
                "all": ", ".join(per_child),
                "raw": ", ".join([str(started // len(processes))] * len(processes)),
                "strategy": "fair",
                "inqueues": {"total": len(processes), "active": len(found["running"])},
            },
        }


def broker_map(urls: str) -> dict[str, Any]:
    """The broker as Celery's stats describe it; passwords stay out."""
    first, *others = each_url(urls)
    parts = urlsplit(first)
    transport, _, _ = parts.scheme.partition("+")
    is_file = transport in ("sqlite", "unix")
    return {
        "hostname": None if is_file else parts.hostname,
        "userid": unquote(parts.username) if parts.username else None,
        "virtual_host": unquote(parts.path).removeprefix("/") or ("/" if transport == "amqp" else "0"),
        "port": None if is_file else parts.port,
        "insist": False,
        "ssl": transport in ("rediss", "sentinels", "amqps"),
        "transport": _TRANSPORTS.get(transport, transport),
        "connect_timeout": 4,
        "transport_options": {},
        "login_method": "PLAIN" if transport.startswith("amqp") else None,
        "uri_prefix": None,
        "heartbeat": 120.0,
        "failover_strategy": "round-robin",
        "alternates": [without_password(url) for url in others],
        "credential_provider": None,
    }


_TRANSPORTS = {"rediss": "redis", "unix": "redis", "sentinels": "sentinel", "amqps": "amqp"}
_USAGE = [name for name in dir(resource.struct_rusage) if name.startswith("ru_")]
