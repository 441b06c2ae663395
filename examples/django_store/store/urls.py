"""Where orders come in."""

from django.db import IntegrityError, transaction
from django.db.models import F
from django.http import HttpRequest, JsonResponse
from django.urls import path

from store.models import Item, Order
from store.tasks import pack


def order(_request: HttpRequest, name: str) -> JsonResponse:
    """An order, its task and the stock: all of it or nothing."""
    try:
        with transaction.atomic():
            made = Order.objects.create(item=Item.objects.get(name=name))
            sent = pack.delay(made.pk)
            Item.objects.filter(name=name).update(left=F("left") - 1)
    except IntegrityError:
        return JsonResponse({"problem": f"no {name} is left"}, status=409)
    return JsonResponse({"order": made.pk, "task": sent.id}, status=202)


urlpatterns = [path("orders/<str:name>/", order)]
