"""What is in stock, and what was ordered."""

from django.db import models


class Item(models.Model):
    name = models.CharField(max_length=40, unique=True)
    left = models.IntegerField()

    class Meta:
        constraints = (models.CheckConstraint(condition=models.Q(left__gte=0), name="not_below_zero"),)


class Order(models.Model):
    item = models.ForeignKey(Item, on_delete=models.CASCADE)
    state = models.CharField(max_length=20, default="new")
