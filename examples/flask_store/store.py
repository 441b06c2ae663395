"""The store: its factory, and where orders come in."""

import os
from pathlib import Path

from flask import Blueprint, Flask
from sqlalchemy.exc import IntegrityError

from database import Base, Item, Order, init_database, session
from tasks import pack, umbel

SQLITE = f"sqlite:///{Path(__file__).parent / 'store.sqlite3'}"
orders = Blueprint("orders", __name__)


def create_app() -> Flask:
    app = Flask("store")
    app.config["DATABASE"] = os.environ.get("DATABASE_URL", SQLITE)
    app.config["UMBEL"] = {"task_time_limit_s": 60}
    init_database(app)
    umbel.init_app(app)
    app.register_blueprint(orders)
    app.cli.command("create-tables")(create_tables)
    return app


@orders.post("/orders/<name>")
def order(name: str) -> tuple[dict[str, object], int]:
    """The task is sent when the order is there: after the commit."""
    try:
        made = Order(item=name)
        session().add(made)
        session().get_one(Item, name).amount -= 1
        session().commit()
    except IntegrityError:
        return {"problem": f"no {name} is left"}, 409
    return {"order": made.id, "task": pack.delay(made.id).id}, 202


def create_tables() -> None:
    """Of the store, with a hat in stock."""
    Base.metadata.create_all(session().get_bind())
    session().add(Item(name="hat"))
    session().commit()
