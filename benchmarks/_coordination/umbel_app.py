"""An app for workers that do nothing but coordinate; its broker is in UMBEL_BROKER."""

from umbel import App

app = App("coordination")


@app.task
def nothing() -> None:
    """What elections have sent."""
