"""The contract suite: what `brokers/interface/` promises, for any broker.

A broker's own test file makes a class of this and gives it a fixture `under_test`. A test of
something that the broker declares it cannot do asserts that it refuses and says why.
"""

import os
from typing import TYPE_CHECKING

from tests.brokers.contract_control import ControlContract
from tests.brokers.contract_failures import FailuresContract
from tests.brokers.contract_limits import LimitsContract
from tests.brokers.contract_marks import MarksContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.contract_processes import ProcessesContract
from tests.brokers.contract_queues import QueueControlContract
from tests.brokers.contract_refusals import RefusalsContract
from tests.brokers.contract_sharing import (
    EventLogContract,
    FanoutContract,
    LeadershipContract,
    RevokesContract,
)
from tests.brokers.contract_signatures import SignaturesContract
from tests.brokers.contract_unique import UniqueContract
from tests.brokers.contract_verdicts import OwnershipContract, VerdictsContract


class LoopContract(
    MessagesContract,
    OwnershipContract,
    VerdictsContract,
    RefusalsContract,
    QueueControlContract,
    FailuresContract,
    FanoutContract,
    EventLogContract,
    RevokesContract,
    LeadershipContract,
    MarksContract,
    UniqueContract,
    LimitsContract,
    SignaturesContract,
    ControlContract,
):
    """Every promise that is kept on one event loop."""


class BrokerContract(LoopContract, ProcessesContract):
    """Every promise."""


if TYPE_CHECKING or os.environ.get("UMBEL_SOAK"):

    class OtherLoopContract(LoopContract):
        """The same on an event loop that is not asyncio's own."""

else:

    class OtherLoopContract(MessagesContract, VerdictsContract, FanoutContract):
        """What waits, wakes and writes; the rest runs the same code."""
