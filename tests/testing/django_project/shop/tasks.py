"""What happens to an order."""

from shop.models import Order
from umbel import App

app = App("shop", broker="redis://127.0.0.1:1/0")


@app.task
def pack(number: int) -> str:
    Order.objects.filter(number=number).update(state="packed")
    return f"packed {number}"


@app.task
def echo(text: str) -> str:
    return text
