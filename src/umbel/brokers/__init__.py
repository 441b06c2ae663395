"""Brokers: where messages wait. One folder for each broker; they never import one another."""
