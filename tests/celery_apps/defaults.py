"""Prints the names of Celery's settings and signals, as JSON. Run with the Python that has Celery."""

import json

from celery import signals
from celery.app.defaults import DEFAULTS
from celery.utils.dispatch import Signal

if __name__ == "__main__":
    known = sorted(name for name, value in vars(signals).items() if isinstance(value, Signal))
    print(json.dumps({"settings": sorted(DEFAULTS), "signals": known}))
