"""The monitor: a model of a running cluster, built from its events; shared by `umbel top`, the dashboard and
the demo.
"""
