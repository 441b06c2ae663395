from typing import Any

from django.db import transaction
from django.http import JsonResponse

from orders import tasks
from orders.models import Order


@transaction.atomic
def create(request: Any) -> Any:
    order = Order.objects.create(item=request.GET["item"])
    tasks.pack.delay_on_commit(order.pk)
    return JsonResponse({"order": order.pk})
