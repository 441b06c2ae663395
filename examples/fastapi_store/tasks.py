"""What happens to an order, after the customer has been answered."""

from umbel import App

app = App("store")


@app.task
def pack(order: int) -> str:
    return f"packed order {order}"
