"""The shop's web API."""

from typing import Any

from fastapi import FastAPI

from shop.tasks import greet, pack

api = FastAPI()


@api.post("/orders/{number}")
def order(number: int) -> dict[str, str]:
    return {"task_id": pack.delay(number).id}


@api.get("/greeting/{name}")
async def greeting(name: str) -> dict[str, Any]:
    return {"greeting": await (await greet.adelay(name))}
