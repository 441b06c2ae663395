"""Commands about a running cluster."""
