"""What happens to an order, after the customer has been answered."""

from database import Order, session
from umbel.contrib.flask import Umbel

umbel = Umbel()


@umbel.task
def pack(order_id: int) -> str:
    """Runs in the application context, so what it opens in it is closed at its end."""
    order = session().get_one(Order, order_id)
    order.state = "packed"
    session().commit()
    return f"packed order {order.id}: {order.item}"
