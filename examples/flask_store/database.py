"""The database: one session for each application context, which is each request and each task."""

from flask import Flask, current_app, g
from sqlalchemy import CheckConstraint, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "items"
    __table_args__ = (CheckConstraint("amount >= 0"),)
    name: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=1)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    state: Mapped[str] = mapped_column(default="new")


def init_database(app: Flask) -> None:
    app.extensions["engine"] = create_engine(app.config["DATABASE"])
    app.teardown_appcontext(close_session)


def session() -> Session:
    if "session" not in g:
        g.session = Session(current_app.extensions["engine"])
    found: Session = g.session
    return found


def close_session(_error: BaseException | None) -> None:
    """Rolls back what was not committed."""
    if "session" in g:
        g.pop("session").close()
