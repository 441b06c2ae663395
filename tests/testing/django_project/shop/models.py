"""Orders."""

from django.db import models


class Order(models.Model):
    number = models.IntegerField()
    state = models.CharField(max_length=20, default="new")
