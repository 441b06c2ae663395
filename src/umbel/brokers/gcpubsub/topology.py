"""Topology: topics and subscriptions that must be there before a message is sent or pulled.

A topic without a subscription forgets what is sent to it. So who sends to a queue makes both first, once
in its life; somebody may delete them, and then they are made again. The calls are values: the blocking and
the asynchronous face make them in the same order.
"""

from collections.abc import Generator
from math import ceil

from umbel.brokers.gcpubsub import api
from umbel.brokers.gcpubsub.api import Call
from umbel.brokers.gcpubsub.names import DEAD, Names, Place
from umbel.brokers.gcpubsub.refusals import Exists
from umbel.brokers.interface import BrokerSettings
from umbel.errors import BrokerRefused

LETTERS_RETENTION_S = 7 * 86_400.0  # the longest that a subscription keeps by default
LETTERS_EXPIRE_S = 31 * 86_400.0
DEAD_PLACE = Place(DEAD, DEAD, DEAD, DEAD)

Calls = Generator[Call, bytes | BrokerRefused, None]
"""Each call is answered with the body, or with the refusal, which is thrown if it is not understood."""


def next_of(calls: Calls, answer: bytes | BrokerRefused | None) -> Call | None:
    """The call that follows this answer (None: the first); None when there is no more."""
    try:
        return next(calls) if answer is None else calls.send(answer)
    except StopIteration:
        return None


class Topology:
    def __init__(self, settings: BrokerSettings, project: str, *, exactly_once: bool) -> None:
        self._settings = settings
        self._project = project
        self._exactly_once = exactly_once
        self.names = Names(settings)
        self.ack_deadline_s = ack_deadline(settings.lease_s)
        self.made: dict[str, int] = {}  # queues, and the deadline of their subscriptions
        self.topics: set[str] = set()

    def forget(self, topic: str) -> None:
        """It is not there any more."""
        self.topics.discard(topic)
        self.made = {
            queue: deadline for queue, deadline in self.made.items() if self.names.place(queue).topic != topic
        }

    def make_topic(self, topic: str, retention_s: float) -> Calls:
        if topic in self.topics:
            return
        _unless_there((yield api.make_topic(self._project, topic, retention_s)))
        self.topics.add(topic)

    def make_dead(self) -> Calls:
        if DEAD in self.topics:
            return
        yield from self.make_topic(DEAD, LETTERS_RETENTION_S)
        self.topics.discard(DEAD)
        subscribing = api.make_subscription(
            self._project,
            DEAD_PLACE,
            ack_deadline_s=60,
            retention_s=LETTERS_RETENTION_S,
            expires_s=LETTERS_EXPIRE_S,
            is_filtered=False,
        )
        _unless_there((yield subscribing))
        self.topics.add(DEAD)

    def make_queue(self, queue: str) -> Calls:
        if queue in self.made:
            return
        place, expires_s = self.names.place(queue), self._settings.subscription_expires_s
        yield from self.make_dead()
        yield from self.make_topic(place.topic, expires_s)
        subscribing = api.make_subscription(
            self._project,
            place,
            ack_deadline_s=self.ack_deadline_s,
            retention_s=expires_s,
            expires_s=expires_s,
            exactly_once=self._exactly_once,
            counts_deliveries_into=DEAD,
        )
        answer = yield subscribing
        if isinstance(answer, BrokerRefused):
            _unless_there(answer)
            answer = yield api.look_at(self._project, place.subscription)
            if isinstance(answer, BrokerRefused):
                raise answer
            found = api.read_subscription(answer)
            if not found.dead_letter_policy:  # Celery's: who may not change it takes it as it is
                yield api.count_deliveries(self._project, place, DEAD)
            self.made[queue] = found.ack_deadline_seconds
        else:
            self.made[queue] = self.ack_deadline_s


def ack_deadline(lease_s: float) -> int:
    return max(api.ACK_DEADLINE_MIN_S, min(ceil(lease_s), api.ACK_DEADLINE_MAX_S))


def _unless_there(answer: bytes | BrokerRefused) -> None:
    if isinstance(answer, BrokerRefused) and not isinstance(answer, Exists):
        raise answer
