"""What happens to an order."""

from shop.models import Order
from umbel.contrib.django import app


@app.task
def pack(number: int) -> str:
    Order.objects.filter(number=number).update(state="packed")
    return f"packed {number}"


@app.task
def echo(text: str) -> str:
    return text
