"""The web dashboard: pages, API and metrics of a running cluster, as an ASGI application."""
