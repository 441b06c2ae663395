"""Umbel in a Django project: `"umbel.contrib.django"` in INSTALLED_APPS, and `UMBEL = {...}` in the settings.

    from umbel.contrib.django import app

    @app.task
    def pack(order_id: int) -> None: ...

`app` is the single app of the project. `python manage.py umbel worker` runs its tasks, which are in the
`tasks.py` of the installed apps.
"""

from umbel.contrib.django.application import DjangoApp, DjangoTask, read_settings

__all__ = ["DjangoApp", "DjangoTask", "app"]

app = DjangoApp(read_settings())
