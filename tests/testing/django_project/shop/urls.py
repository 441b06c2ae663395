"""Where orders come in."""

from django.http import HttpRequest, JsonResponse
from django.urls import path

from shop.models import Order
from shop.tasks import echo, pack


def order(request: HttpRequest, number: int) -> JsonResponse:
    Order.objects.create(number=number)
    return JsonResponse({"task_id": pack.delay(number).id}, status=202)


def paid(request: HttpRequest, number: int) -> JsonResponse:
    """Whoever pays is sent the goods, once that is sure."""
    return JsonResponse({"task_id": pack.delay_on_commit(number).id}, status=202)


def said(request: HttpRequest, text: str) -> JsonResponse:
    return JsonResponse({"said": echo.delay(text).get(timeout=30)})


urlpatterns = [
    path("orders/<int:number>/", order),
    path("paid/<int:number>/", paid),
    path("echo/<str:text>/", said),
]
