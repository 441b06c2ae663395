"""What happens to an order, after the customer has been answered."""

from store.models import Order
from umbel.contrib.django import app


@app.task
def pack(order_id: int) -> str:
    """The order is there: this task is sent when the transaction that made it is committed."""
    order = Order.objects.select_related("item").get(pk=order_id)
    order.state = "packed"
    order.save(update_fields=["state"])
    return f"packed order {order.pk}: {order.item.name}"


@app.periodic(cron="0 6 * * *")
@app.task
async def count_unpacked() -> int:
    """Coroutines use Django's async methods; each has a connection of its own."""
    count: int = await Order.objects.exclude(state="packed").acount()
    return count
