"""The wire format: values as bytes and back. Pure; msgspec is the only library."""
