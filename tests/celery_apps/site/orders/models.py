from django.db import models


class Order(models.Model):
    item = models.CharField(max_length=50)
    state = models.CharField(max_length=20, default="new")


class Tick(models.Model):
    """One run of the periodic task."""

    name = models.CharField(max_length=50)
    task_id = models.CharField(max_length=50)
