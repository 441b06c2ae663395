"""Settings of an app: their types, sources and help texts."""
