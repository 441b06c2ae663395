"""Preparation: from a call to the message that is sent. Options, routes, the task's own options and the
settings say what it bears; then it is encoded and signed.

What is the same for every call of a task is worked out once (`SendDefaults`). A call that states nothing but
its arguments takes a short path. Trust is inherited: what an unsigned message causes is unsigned (`signed`).
"""

import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from os import getpid, urandom
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from umbel.app.options import (
    NAMES_MAX,
    Router,
    SendOptions,
    TaskOptions,
    check_limit,
    check_options,
    checked_priority,
)
from umbel.app.request import CURRENT_REQUEST, Request, unsigned_run
from umbel.app.settings import Settings
from umbel.app.types import CallTypes
from umbel.app.waiting import patiently
from umbel.backends.interface import Backend
from umbel.backends.registry import sends_results
from umbel.brokers.interface import BrokerSettings, Producer
from umbel.brokers.registry import open_producer
from umbel.clock import cluster_now
from umbel.errors import NoClusterId, TooLarge
from umbel.outbox.current import OPEN, open_block
from umbel.protocol.delivery.trust import UNSIGNED, ClusterId
from umbel.text import without_password
from umbel.wire.call import Embed, TaskCall, TaskHeaders
from umbel.wire.message import (
    HEADER_TEXT_MAX_CHARS,
    LATEST_S,
    TASK_MAX_CHARS,
    Message,
    Outgoing,
    format_instant,
    is_task_name,
    parse_instant,
)
from umbel.wire.show import brief, show_args, show_kwargs
from umbel.wire.signing import Keyring, Signer, marked_unsigned, signer_of
from umbel.wire.steps import SignatureMap, answering
from umbel.wire.task import CallTemplate, encode_task

# ---- signed ----------------------------------------------------------------------------------------
#
# With what trust a message is sent, and its signature.
#
# Trust is inherited. What an unsigned message causes is unsigned: its callbacks and errbacks, the next step
# of its chain, the body of a chord that it completes, its retries, what replaces it, and what the code of
# its task sends while it runs, in other threads too. Otherwise anyone who may write to one queue would
# choose what runs on every other. Such a message names the task that sent it, so that the refusal shows
# where it came from.
#
# A message is bound to the cluster when it is signed. One for an outbox is not, because no broker may be
# reachable inside a transaction: the relay binds it. In eager mode nothing is signed, since nothing is
# sent.


class SigningApp(Protocol):
    """What signing needs of the app."""

    @property
    def settings(self) -> Settings:
        """The settings with the signing keys and the timeout for asking the broker."""

    @property
    def eager_backend(self) -> object | None:
        """The in-memory result backend of eager mode; None where messages go to a broker."""

    @property
    def signing_cluster(self) -> "KnownCluster":
        """The cluster id that signatures of this process are bound to."""

    @property
    def producer(self) -> Producer:
        """The blocking producer, which is asked for the cluster's id."""


def signed(
    app: SigningApp,
    keyring: Keyring,
    outgoing: Outgoing,
    sender: Request | None = None,
    *,
    is_canonical: bool = False,
) -> Outgoing:
    """The message with its signature, unless its sender is not trusted. Every message passes through here."""
    cause = sender or CURRENT_REQUEST.get() or unsigned_run()
    signs_for = None if cause is None else cause.signs_for
    if signs_for == UNSIGNED:
        assert cause is not None, "only a task can be untrusted"
        return marked_unsigned(outgoing, cause.id)
    if OPEN.get() is not None and open_block(app) is not None:
        return keyring.sign_row(outgoing, cluster_now())
    signer = app.signing_cluster.signer(app) if signs_for is None else signer_of(keyring, signs_for)
    if signer is None:
        return outgoing
    return signer.sign_task(outgoing, cluster_now(), is_canonical=is_canonical)


def is_trusted() -> bool:
    """Whether messages sent from here may be signed: this code does not run for an unsigned message."""
    cause = CURRENT_REQUEST.get() or unsigned_run()
    return cause is None or cause.signs_for != UNSIGNED


def signed_once(app: SigningApp, outgoing: Outgoing, nonce: str) -> Outgoing:
    """Sign a message with a fixed nonce, so that it runs once however often it is made."""
    signer = app.signing_cluster.signer(app)
    return outgoing if signer is None else signer.sign_task(outgoing, cluster_now(), nonce=nonce)


class KnownCluster:
    """The cluster id that this process signs for: the setting `signing_cluster`, else the id that the broker
    has.
    """

    def __init__(self) -> None:
        self._found = ""
        self._settings: Settings | None = None  # the ones that the signer was made for
        self._signer: Signer | None = None

    def is_missing(self, settings: Settings) -> bool:
        """Whether the broker must be asked for its id before anything can be signed."""
        return settings.keyring is not None and not (settings.signing_cluster or self._found)

    def learn(self, cluster: str) -> None:
        """Take this as the broker's id; signatures are bound to it from now on."""
        if cluster != self._found:
            self._found, self._settings = cluster, None

    def signer(self, app: SigningApp) -> Signer | None:
        """Return the signer for this cluster; None without keys or in eager mode. Asks the broker for its id
        once.

        NoClusterId: the broker has no id.
        """
        settings = app.settings
        if self._settings is settings:
            return self._signer
        keyring = settings.keyring
        if keyring is None:
            return None
        if self.is_missing(settings):
            if app.eager_backend is not None:
                return None
            producer = app.producer
            found = patiently(producer.cluster_id, settings.publish_timeout_s)
            if found is None:
                raise NoClusterId.at(without_password(settings.broker))
            self._found = found.id
        self._signer = signer_of(keyring, settings.signing_cluster or self._found)
        self._settings = settings
        return self._signer


def read_cluster_id(settings: BrokerSettings) -> ClusterId | None:
    """Ask the broker for its id, over a separate connection. Blocks."""
    producer = open_producer(settings)
    try:
        return producer.cluster_id()
    finally:
        producer.close()


# ---- defaults --------------------------------------------------------------------------------------
#
# What holds for the calls of one task that state nothing else, computed once.
#
# Precedence: the task's own option, then the route, then the app's setting.


class Sender(Protocol):
    """What sending needs of the app."""

    @property
    def settings(self) -> Settings:
        """The app's settings, the last source of every default."""

    @property
    def router(self) -> Router:
        """The routes of `task_routes`, which choose queues and priorities by task name."""

    @property
    def backend(self) -> Backend:
        """The result backend, which may have an address for replies."""

    @property
    def send_defaults(self) -> dict[str, "SendDefaults"]:
        """The cache of defaults by task name; bounded by NAMES_MAX."""

    @property
    def eager_backend(self) -> object | None:
        """The in-memory result backend of eager mode; None where messages go to a broker."""

    @property
    def signing_cluster(self) -> KnownCluster:
        """The cluster id that messages are signed for."""

    @property
    def producer(self) -> Producer:
        """The blocking producer, which is asked for the cluster's id."""


class SendDefaults(msgspec.Struct, frozen=True):
    """What holds for every call of one task that states nothing else; computed once for each task."""

    own: TaskOptions
    settings: Settings
    queue: str
    priority: int
    serializer: str
    sends_results: bool
    headers: TaskHeaders  # without those that differ from call to call
    template: CallTemplate | None  # None: not JSON, an expiry, a cluster limit, or sensitive arguments
    keyring: Keyring | None  # what its messages are signed with


def make_defaults(app: Sender, task: str, own: TaskOptions) -> SendDefaults:
    """Compute and cache the defaults of a task; ValueError for an invalid name, queue or priority."""
    if len(app.send_defaults) >= NAMES_MAX:
        app.send_defaults.clear()
    if not is_task_name(task):
        raise ValueError(
            f"task name {brief(task)} is not valid; it must be text of 1 to {TASK_MAX_CHARS} characters"
        )
    settings, route = app.settings, app.router.route(task)
    keyring = settings.keyring
    queue = queue_of(app, task, own)
    check_options({"queue": queue})
    headers = TaskHeaders(
        task=task,
        id="",
        timelimit=(
            first(own.time_limit_s, settings.task_time_limit_s),
            first(own.soft_time_limit_s, settings.task_soft_time_limit_s),
        ),
        ignore_result=first(own.ignore_result, settings.task_ignore_result),
    )
    serializer = own.serializer or settings.task_serializer
    check_limit(own, settings.for_broker())
    made = app.send_defaults[task] = SendDefaults(
        own=own,
        settings=settings,
        queue=queue,
        priority=checked_priority(first(own.priority, route.get("priority"), settings.task_default_priority)),
        serializer=serializer,
        sends_results=sends_results(settings.backend),
        headers=headers,
        template=(
            CallTemplate(headers, text_max=text_max(settings), is_canonical=keyring is not None)
            if own.is_plain(serializer)
            else None
        ),
        keyring=keyring,
    )
    return made


def queue_of(app: Sender, task: str, own: TaskOptions) -> str:
    """The queue for calls of the task that name none."""
    return own.queue or app.router.route(task).get("queue") or app.settings.task_default_queue


def text_max(settings: Settings) -> int:
    """How many characters of arguments the headers of a message may show."""
    return min(settings.task_repr_max_chars, HEADER_TEXT_MAX_CHARS)


def first(*values: Any) -> Any:
    """The first value that is not None; None if there is none."""
    for value in values:
        if value is not None:
            return value
    return None


# ---- stated ----------------------------------------------------------------------------------------
#
# What a call states in options, apart from its arguments, and the message that carries it.
#
# When it is due and when it expires, what follows it, where its result goes, what it is stamped with.


def encoded_in_full(
    app: Sender,
    task_id: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    send_defaults: SendDefaults,
    sender: Request | None,
    origin: str,
) -> Outgoing:
    """Encode a call whose options the template has no gaps for: header by header."""
    stated, due, expiration_ms = _stated(options, send_defaults)
    headers = replace(
        send_defaults.headers,
        id=task_id,
        root_id=options.get("root_id") or (sender.root_id if sender else None) or task_id,
        parent_id=options.get("parent_id") or (sender.id if sender else None),
        origin=origin,
        umbel_limit=send_defaults.own.limit_key(args, kwargs),
        **_shown(send_defaults, args, kwargs),
        **stated,
    )
    reply_to = stated_reply_to(
        app, options, send_defaults, wants_result=not headers.ignore_result or "chain" in options
    )
    call = TaskCall(
        headers=headers,
        args=list(args),
        kwargs=dict(kwargs),
        embed=_embed(options, reply_to),
        extra=dict(options.get("headers") or {}),
        reply_to=reply_to,
        priority=stated_priority(options, send_defaults),
    )
    message = encode_task(
        call,
        serializer=options.get("serializer") or send_defaults.serializer,
        compression=options.get("compression"),
        expiration_ms=expiration_ms,
    )
    return Outgoing(stated_queue(options, send_defaults), message, due)


def _shown(send_defaults: SendDefaults, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The arguments as the headers show them, without the sensitive ones."""
    if send_defaults.own.hides is not None:
        args, kwargs = send_defaults.own.hides.hide(args, kwargs)
    most = text_max(send_defaults.settings)
    return {"argsrepr": show_args(args, most), "kwargsrepr": show_kwargs(kwargs, most)}


def stated_queue(options: SendOptions, send_defaults: SendDefaults) -> str:
    """The queue that the call names, else the task's."""
    return options.get("queue") or options.get("routing_key") or send_defaults.queue


def stated_priority(options: SendOptions, send_defaults: SendDefaults) -> int:
    """The priority that the call states, else the task's; ValueError if it is out of range."""
    stated = options.get("priority")
    return send_defaults.priority if stated is None else checked_priority(stated)


def _stated(options: SendOptions, send_defaults: SendDefaults) -> tuple[Mapping[str, Any], float, int | None]:
    """The headers that the call itself states, when it is due, and after how many ms it expires."""
    due, eta = _due(options)
    expires, expiration_ms = _expiry(options, send_defaults.own)
    hard_s, soft_s = send_defaults.headers.timelimit
    stated = {
        "eta": eta,
        "expires": expires,
        "timelimit": (
            first(options.get("time_limit"), hard_s),
            first(options.get("soft_time_limit"), soft_s),
        ),
        **_stamps(options),
    }
    for name, value in options.items():
        if name in _HEADER_OF and value is not None:
            stated[_HEADER_OF[name]] = value
    return stated, due, expiration_ms


_HEADER_OF = {  # options whose values become headers unchanged
    "shadow": "shadow",
    "group_id": "group",
    "group_index": "group_index",
    "retries": "retries",
    "ignore_result": "ignore_result",
    "unique_token": "umbel_unique",
    "replaced_task_nesting": "replaced_task_nesting",
}


def stated_reply_to(
    app: Sender, options: SendOptions, send_defaults: SendDefaults, *, wants_result: bool
) -> str:
    """The address that the result is sent to; "" where results are looked up, or this one is not wanted."""
    given = options.get("reply_to")
    if given is not None:
        return given
    if not wants_result or not send_defaults.sends_results:
        return ""
    backend = app.backend
    timeout_s = send_defaults.settings.publish_timeout_s
    return patiently(lambda: backend.reply_to, timeout_s)


def instant(value: datetime | str | float) -> float:
    """Unix time from what a user may pass: a datetime, ISO text, or seconds."""
    if isinstance(value, datetime):
        return min((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp(), LATEST_S)
    if isinstance(value, str):
        return parse_instant(value)
    return float(value)


def _due(options: SendOptions) -> tuple[float, str | None]:
    if "countdown" in options and options["countdown"] is not None:
        due = cluster_now() + options["countdown"]
    elif options.get("eta") is not None:
        due = instant(options["eta"])
    else:
        return 0.0, None
    return due, format_instant(due)


def _expiry(options: SendOptions, own: TaskOptions) -> tuple[str | None, int | None]:
    expires = first(options.get("expires"), own.expires_s)
    if expires is None:
        return None, None
    now = cluster_now()
    # A number is seconds from now, as in Celery; anything else is a point in time.
    at = now + expires if isinstance(expires, int | float) else instant(expires)
    return format_instant(at), max(0, int((at - now) * 1000))


def _embed(options: SendOptions, reply_to: str) -> Embed:
    if options.keys().isdisjoint(("link", "link_error", "chain", "chord")):
        return _EMPTY
    steps = options.get("chain")
    if steps and reply_to:
        steps = [answering(step, reply_to) for step in steps]
    return Embed(
        callbacks=_maps(options.get("link")),
        errbacks=_maps(options.get("link_error")),
        chain=steps or None,
        chord=options.get("chord"),
    )


_EMPTY = Embed()


def _maps(signatures: Any) -> list[SignatureMap] | None:
    if not signatures:
        return None
    several = signatures if isinstance(signatures, list | tuple) else [signatures]
    return [signature.to_map() if hasattr(signature, "to_map") else signature for signature in several]


def _stamps(options: SendOptions) -> dict[str, Any]:
    names = options.get("stamped_headers")
    if not names:
        return {}
    given = {**(options.get("stamps") or {}), **options}
    return {"stamped_headers": list(names), "stamps": {name: given[name] for name in names if name in given}}


# ---- preparing -------------------------------------------------------------------------------------
#
# From "call this task with these options" to a message and its queue.
#
# Everything that sends a task goes through `prepare`: `delay`, signatures, retries, callbacks and the steps
# of a chain, in clients and inside running tasks. Precedence: the call's option, then the task's own, then
# the route, then the app's setting.

_NO_TASK = TaskOptions()


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A message that is ready to be published, with what its result handle needs."""

    task: str
    task_id: str
    outgoing: Outgoing
    ignores_result: bool
    types: CallTypes | None = None  # of the task, where that is known here


def is_unique(own: TaskOptions | None, options: SendOptions) -> bool:
    """Whether the call's options or the task's own make the call unique."""
    if "unique_key" in options or "unique_for" in options:
        return True
    return own is not None and own.unique_for_s is not None


def prepare(
    app: Sender,
    task: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: SendOptions,
    *,
    defaults: TaskOptions | None = None,
    sender: Request | None = None,
    task_id: str = "",
) -> Prepared:
    """Return the message of one call, signed and with its queue; TooLarge above `message_max_bytes`.

    `task_id` is for a call whose options name none; without it such a call gets a new id.
    """
    if options:
        check_options(options)
        task_id = options.get("task_id") or task_id
    task_id = task_id or new_id()
    send_defaults = _send_defaults(app, task, defaults or _NO_TASK)
    ignores_result = send_defaults.headers.ignore_result
    types = send_defaults.own.types
    if types is not None:
        args, kwargs = types.lower(args, kwargs, options.get("serializer") or send_defaults.serializer)
    is_canonical = True
    if send_defaults.template is None or not _PLAIN.issuperset(options):
        is_canonical = False
        ignores_result = first(options.get("ignore_result"), ignores_result)
        outgoing = encoded_in_full(app, task_id, args, kwargs, options, send_defaults, sender, origin())
    elif options or sender is not None or send_defaults.sends_results:
        message = send_defaults.template.message(
            task_id,
            args,
            kwargs,
            origin=origin(),
            root_id=options.get("root_id") or (sender.root_id if sender else None),
            parent_id=options.get("parent_id") or (sender.id if sender else None),
            group=options.get("group_id"),
            group_index=options.get("group_index"),
            priority=stated_priority(options, send_defaults),
            reply_to=stated_reply_to(app, options, send_defaults, wants_result=not ignores_result),
        )
        outgoing = Outgoing(stated_queue(options, send_defaults), message)
    else:  # most calls: nothing is stated but the arguments
        message = send_defaults.template.message(
            task_id, args, kwargs, origin=origin(), priority=send_defaults.priority
        )
        outgoing = Outgoing(send_defaults.queue, message)
    if (keyring := send_defaults.keyring) is not None:
        outgoing = signed(app, keyring, outgoing, sender, is_canonical=is_canonical)
    check_size(outgoing.message, send_defaults.settings.message_max_bytes, task)
    return Prepared(task, task_id, outgoing, bool(ignores_result), types)


# Options that need no other headers than those in the gaps of the template.
_PLAIN = frozenset(
    {
        "task_id",
        "root_id",
        "parent_id",
        "group_id",
        "group_index",
        "queue",
        "routing_key",
        "exchange",
        "priority",
        "reply_to",
    }
)


def _send_defaults(app: Sender, task: str, own: TaskOptions) -> SendDefaults:
    known = app.send_defaults.get(task)
    # A task that is defined again has other options.
    if known is not None and known.own is own and known.settings is app.settings:
        return known
    return make_defaults(app, task, own)


def check_size(message: Message, most: int, task: str) -> None:
    """Raise TooLarge for a message that is longer than the limit."""
    size = len(message.body) + len(message.headers)
    if size > most:
        raise TooLarge(
            f"the message for task {task!r} has {size} bytes, over the limit of {most}; "
            "send a reference to the data instead, or raise 'message_max_bytes'"
        )


def origin() -> str:
    """The anonymous node name of this client, as Celery has it."""
    return _origin(getpid())


@lru_cache(maxsize=4)
def _origin(pid: int) -> str:
    return f"gen{pid}@{socket.gethostname()}"


def new_id() -> str:
    """A random id in the form of RFC 4122, version 4, as `str(uuid4())` makes it, at a third of the cost."""
    return _as_id(urandom(16).hex())


def new_ids(count: int) -> list[str]:
    """Many random ids, for the price of one system call."""
    digits = urandom(16 * count).hex()
    return [_as_id(digits[first : first + 32]) for first in range(0, 32 * count, 32)]


def _as_id(digits: str) -> str:
    variant = _VARIANT[digits[16]]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


_VARIANT = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}
