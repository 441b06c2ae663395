"""Bytes and values: how what we say looks on the wire. Pure; msgspec is the only helper."""
