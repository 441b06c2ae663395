"""A private RabbitMQ node: on free ports of the loopback, in a directory of its own.

It takes seconds to start, so one serves all tests of a run, in whichever process they are, and every test
gets a virtual host of its own, which is as good as an empty broker. Virtual hosts are deleted when their test
or file ends: each makes the next one slower to create. Tests that stop or restart a node, or set it up
differently, start one of their own with `RabbitServer`.
"""

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from tests.servers.certificates import Certificates, Signed, certificates_in, make_certificates
from tests.servers.ports import free_ports
from tests.servers.shared import ends_with_run, once
from tests.waiting import wait_until

PROGRAMS = Path("/usr/lib/rabbitmq/bin")  # the wrappers in /usr/sbin change the user
START_S = 240.0
CONTROL_S = 60.0


@dataclass
class RabbitServer:
    """Start with `start()`. `options` are those of the application `rabbit`, numbers all."""

    directory: Path
    options: Mapping[str, int] = field(default_factory=dict)
    certificates: Certificates | None = None  # with them, it speaks TLS on another port as well
    ports: list[int] = field(default_factory=lambda: free_ports(4))
    beside: "RabbitServer | None" = None  # the node whose cluster this one joins, with `join()`
    _process: subprocess.Popen[bytes] | None = None
    _vhosts: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server runs"
        return self._process.pid

    def url(self, vhost: str = "/") -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost}"

    def tls_url(self, vhost: str = "/", *, options: str = "", host: str = "127.0.0.1") -> str:
        return f"amqps://guest:guest@{host}:{self.ports[3]}/{vhost}{options and '?'}{options}"

    def listen_with(self, shown: Signed) -> int:
        """The number of another TLS port, on which the server shows this certificate."""
        assert self.certificates is not None
        (port,) = free_ports(1)
        files = f'{{cacertfile,"{self.certificates.authority}"}},{{certfile,"{shown.certificate}"}}'
        options = f'[{files},{{keyfile,"{shown.key}"}},{{verify,verify_peer}},{{fail_if_no_peer_cert,true}}]'
        self.evaluate(f'rabbit_networking:start_ssl_listener({{"127.0.0.1",{port}}}, {options}, 2).')
        return port

    def new_vhost(self) -> str:
        """A virtual host that nobody has used."""
        name = f"t{uuid4().hex[:12]}"
        self.add_vhost(name)
        self._vhosts.append(name)
        return name

    def add_vhost(self, name: str) -> None:
        self.evaluate(
            f'ok = rabbit_vhost:add(<<"{name}">>, <<"test">>), '
            "rabbit_auth_backend_internal:set_permissions("
            f'<<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>).'
        )

    def replace_vhost(self, name: str) -> None:
        """Delete it and make an empty one of the same name."""
        self.evaluate(f'rabbit_vhost:delete(<<"{name}">>, <<"test">>).')
        self.add_vhost(name)

    def delete_vhosts(self, *names: str) -> None:
        """These virtual hosts, or all that this process made; what is connected to them is disconnected."""
        doomed = [name for name in self._vhosts if name in names or not names]
        if doomed:
            listed = ",".join(f'<<"{name}">>' for name in doomed)
            self.evaluate(f'[rabbit_vhost:delete(V, <<"test">>) || V <- [{listed}], rabbit_vhost:exists(V)].')
            self._vhosts = [name for name in self._vhosts if name not in doomed]

    def allow(self, granted: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        """Users (password `word`), hosts, and the patterns that each may configure, write and read."""
        calls = [
            f'catch rabbit_auth_backend_internal:add_user({_erlang(user)}, <<"word">>, <<"test">>), '
            f"rabbit_auth_backend_internal:set_permissions({_erlang(user)}, {_erlang(vhost)}, "
            f'{", ".join(map(_erlang, rights))}, <<"test">>)'
            for user, vhost, rights in granted
        ]
        self.evaluate(f"{', '.join(calls)}.")

    def close_connections(self, vhost: str) -> None:
        """Close the connections of clients to this virtual host, as an administrator does.

        One that ends by itself meanwhile is no longer there to be closed.
        """
        tracked = f'rabbit_connection_tracking:list(<<"{vhost}">>)'
        self.evaluate(
            f'[catch rabbit_networking:close_connection(Pid, "closed by a test") '
            f"|| Connection <- {tracked}, Pid <- tuple_to_list(Connection), is_pid(Pid)]."
        )

    def limit_memory(self, fraction: float) -> None:
        """With 0.0 there is an alarm at once, and no publisher is heard; 0.4 is the default."""
        self.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark({fraction}).")

    def start(self) -> None:
        program = PROGRAMS / "rabbitmq-server"
        assert program.exists(), "RabbitMQ is missing: apt-get install rabbitmq-server"
        self._write_settings()
        with (self.directory / "out.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program],
                cwd=self.directory,
                env=self._environment(),
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C ends the tests; they end the server
            )
        epmd = f"epmd -port {(self.beside or self).ports[2]} -kill >/dev/null 2>&1"  # has a group of its own
        ends_with_run(self._process, self.directory, "KILL", epmd)
        wait_until(self._answers, deadline_s=START_S, what=f"RabbitMQ in {self.directory}")

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        self._process.send_signal(sign)
        self._process.wait(START_S)
        self._process = None
        # The port mapper daemon that Erlang started outlives its node.
        if self.beside is None and (epmd := shutil.which("epmd")) is not None:
            subprocess.run(
                [epmd, "-port", str(self.ports[2]), "-kill"],
                env=self._environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )

    def join(self) -> None:
        """Become a node of the other's cluster, with nothing of one's own."""
        assert self.beside is not None
        for command in (["stop_app"], ["reset"], ["join_cluster", self.beside._node], ["start_app"]):
            self.control(*command)

    def kill(self) -> None:
        """As a machine's loss of power: the node itself, not only the script that waits for it."""
        assert self._process is not None, "the server runs"
        for process in psutil.Process(self._process.pid).children(recursive=True):
            process.kill()
        self._process.wait(START_S)
        self._process = None

    def evaluate(self, expressions: str) -> None:
        """Run Erlang in the node, with a dot at the end. rabbitmqctl can do it too, for a second of CPU."""
        cookie = ((self.beside or self).directory / ".erlang.cookie").read_text()
        caller = f"c{uuid4().hex[:12]}"  # two that call at a time may not have the same name
        command = ["erl_call", "-h", caller, "-n", self._node, "-c", cookie, "-e"]
        done = subprocess.run(
            command,
            env=self._environment(),
            input=f"{expressions}\n",
            capture_output=True,
            text=True,
            timeout=CONTROL_S,
            check=True,
        )
        assert done.stdout.startswith("{ok,"), f"{expressions}: {done.stdout} {done.stderr}"

    def control(self, *command: str) -> str:
        """The output of rabbitmqctl."""
        program = [str(PROGRAMS / "rabbitmqctl"), "--quiet", "-n", self._node, *command]
        done = subprocess.run(program, env=self._environment(), capture_output=True, text=True, check=True)
        return done.stdout

    @property
    def _node(self) -> str:
        return f"umbel{self.port}@localhost"

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "out.log").read_text()
        return "Starting broker... completed" in (self.directory / "out.log").read_text()

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "HOME": str((self.beside or self).directory),  # where the secret is that nodes share
            "ERL_CRASH_DUMP": str(self.directory / "erl_crash.dump"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.ports[1]),
            "ERL_EPMD_PORT": str((self.beside or self).ports[2]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.directory / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
        }

    def _write_settings(self) -> None:
        anything = {"configure": ".*", "write": ".*", "read": ".*"}
        definitions = {
            "users": [{"name": "guest", "password_hash": _hash("guest"), "tags": "administrator"}],
            "vhosts": [{"name": "/"}],
            "permissions": [{"user": "guest", "vhost": "/", **anything}],
        }
        (self.directory / "definitions.json").write_text(json.dumps(definitions))
        (self.directory / "enabled_plugins").write_text("[].")
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "load_definitions": str(self.directory / "definitions.json"),
        }
        if (made := self.certificates) is not None:
            settings |= {
                "listeners.ssl.1": f"127.0.0.1:{self.ports[3]}",
                "ssl_options.cacertfile": str(made.authority),
                "ssl_options.certfile": str(made.server.certificate),
                "ssl_options.keyfile": str(made.server.key),
                "ssl_options.verify": "verify_peer",
                "ssl_options.fail_if_no_peer_cert": "true",
            }
        options = ",".join(f"{{{name},{value}}}" for name, value in self.options.items())
        (self.directory / "advanced.config").write_text(f"[{{rabbit,[{options}]}}].")
        (self.directory / "rabbitmq.conf").write_text(
            "".join(f"{name} = {value}\n" for name, value in settings.items())
        )


def _erlang(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'<<"{escaped}">>'


def _hash(password: str) -> str:
    salt = b"salt"
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


@cache
def shared_server() -> RabbitServer:
    """The node of this run, which tests neither stop nor set up differently."""
    found = once("rabbitmq", _start_for_run)
    directory = Path(found["directory"])
    return RabbitServer(directory, certificates=certificates_in(directory), ports=found["ports"])


def _start_for_run(directory: Path) -> dict[str, Any]:
    server = RabbitServer(directory, certificates=make_certificates(directory))
    server.start()
    return {"directory": str(directory), "ports": server.ports}


def delete_vhosts() -> None:
    """All virtual hosts of the shared node that this process made."""
    if shared_server.cache_info().currsize:
        shared_server().delete_vhosts()


@pytest.fixture
def amqp_url() -> Iterator[str]:
    """An empty broker: a virtual host that nobody has used."""
    server = shared_server()
    vhost = server.new_vhost()
    yield server.url(vhost)
    server.delete_vhosts(vhost)
