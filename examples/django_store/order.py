"""Order something, as a customer would, and wait until it is packed: `python order.py hat`."""

import os
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "store.settings")
django.setup()

from django.test import Client  # noqa: E402 (models can be imported once Django is set up)

from store.models import Item, Order  # noqa: E402
from umbel.contrib.django import app  # noqa: E402


def main(name: str) -> None:
    Item.objects.get_or_create(name=name, defaults={"left": 1})
    answer = Client().post(f"/orders/{name}/").json()
    if "problem" in answer:
        print(f"{answer['problem']}; orders: {Order.objects.count()}")
    else:
        print(app.AsyncResult(answer["task"]).get(timeout=60))


if __name__ == "__main__":
    main(sys.argv[1])
