"""Stamping: headers that go with every message of a canvas, by which its tasks can be found and revoked.

Stamps are options of a signature; `stamped_headers` says which of its options are stamps. A visitor may say
other stamps for each signature; it is asked in the order in which the parts would run.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Stamps = dict[str, Any]


class StampingVisitor:
    """What to stamp each part of a canvas with. Each method returns the stamps, or nothing."""

    def on_signature(self, sig: Any, **headers: Any) -> Mapping[str, Any] | None:
        return None

    def on_group_start(self, group: Any, **headers: Any) -> Mapping[str, Any] | None:
        return None

    def on_group_end(self, group: Any, **headers: Any) -> None:
        return None

    def on_chain_start(self, chain: Any, **headers: Any) -> Mapping[str, Any] | None:
        return None

    def on_chain_end(self, chain: Any, **headers: Any) -> None:
        return None

    def on_chord_header_start(self, sig: Any, **headers: Any) -> Mapping[str, Any] | None:
        """Like a group, which a header is."""
        return self.on_group_start(sig.header, **headers)

    def on_chord_header_end(self, sig: Any, **headers: Any) -> None:
        self.on_group_end(sig.header, **headers)

    def on_chord_body(self, sig: Any, **headers: Any) -> Mapping[str, Any] | None:
        return None

    def on_callback(self, callback: Any, **headers: Any) -> Mapping[str, Any] | None:
        return None

    def on_errback(self, errback: Any, **headers: Any) -> Mapping[str, Any] | None:
        return None


class Stamped(Protocol):
    """What a signature is to its stamps."""

    options: Any

    def stamped(self, options: Mapping[str, Any]) -> None:
        """Take over these options, stamps among them."""
        ...

    def linked(self, name: str) -> "Sequence[Stamped]":
        """Its callbacks (`link`) or errbacks (`link_error`), as signatures."""
        ...

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **stamps: Any
    ) -> Any:
        """Stamp it, with all its parts."""
        ...


def stamp_signature(
    signature: Stamped, visitor: StampingVisitor | None, append: bool, stamps: Mapping[str, Any]
) -> None:
    """A plain one: itself and what is linked to it."""
    stamp_links(signature, visitor, append, stamps)
    said = None if visitor is None else visitor.on_signature(signature, **stamps)
    signature.stamped(merged(stamps, said, signature.options, append=append))


def stamp_links(
    signature: Stamped, visitor: StampingVisitor | None, append: bool, stamps: Mapping[str, Any]
) -> None:
    """Its callbacks and errbacks; they do not take over the stamps that it has itself."""
    for name in ("link", "link_error"):
        headers = dict(stamps)
        for linked in signature.linked(name):
            said: Mapping[str, Any] | None = None
            if visitor is not None:
                ask = visitor.on_callback if name == "link" else visitor.on_errback
                said = ask(linked, **headers)
            headers = merged(headers, said, {}, append=append)
            linked.stamp(visitor, append, **headers)


def merged(
    stamps: Mapping[str, Any], said: Mapping[str, Any] | None, options: Mapping[str, Any], *, append: bool
) -> Stamps:
    """The stamps from above, those that a visitor said, and those that a signature has, as its options."""
    whole = {name: value for name, value in stamps.items() if name != "stamped_headers"}
    own = {name: options[name] for name in options.get("stamped_headers") or () if name in options}
    names = [*_names(stamps), *_names(said or {}), *own]
    for more in (said or {}, own):
        for name, value in more.items():
            if name == "stamped_headers":
                continue
            known = whole.get(name)
            if name not in whole:
                whole[name] = value
            elif append or (isinstance(known, list) and isinstance(value, list)):
                whole[name] = [*_as_list(known), *_as_list(value)]
    return {**whole, "stamped_headers": list(dict.fromkeys(names))}


def _names(stamps: Mapping[str, Any]) -> Sequence[str]:
    """Which of these are stamps: all, if it does not say."""
    said: Sequence[str] = stamps.get("stamped_headers") or list(stamps)
    return said


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set) else [value]
