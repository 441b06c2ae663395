"""What a broker of messages can do with a coordination store beside it."""

from msgspec.structs import replace

from umbel.brokers.interface import Capabilities

# Those that the store brings, each with its reason where the store lacks it too.
FROM_STORE = (
    "leases",
    "event_log",
    "unique",
    "limits",
    "events",
    "revokes",
    "pauses",
    "failures",
    "marks",
    "delayed",
)


def composed(messages: Capabilities, store: Capabilities) -> Capabilities:
    brought = {ability: getattr(store, ability) for ability in FROM_STORE}
    reasons = {name: why for name, why in messages.reasons.items() if name not in FROM_STORE}
    reasons |= {name: store.reasons[name] for name in FROM_STORE if name in store.reasons}
    if "fenced_publish" in store.reasons:
        reasons["fenced_publish"] = store.reasons["fenced_publish"]
    return replace(messages, **brought, events_of_others=store.events_of_others, reasons=reasons)
