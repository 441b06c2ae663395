"""The client for async code: what blocks in the rest of `app/` is awaited here, with the same decisions."""
