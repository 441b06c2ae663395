"""The store: orders come in, and who asks later is told what became of them."""

from fastapi import FastAPI, HTTPException

from tasks import app, pack
from umbel.contrib.fastapi import Umbel, lifespan
from umbel.errors import BrokerUnavailable

site = FastAPI(lifespan=lifespan(app))


@site.post("/orders/{number}", status_code=202)
async def order(number: int) -> dict[str, str]:
    try:
        sent = await pack.adelay(number)
    except BrokerUnavailable as error:
        raise HTTPException(503, str(error)) from error
    return {"task": sent.id}


@site.get("/orders/{task_id}")
async def outcome(task_id: str, umbel: Umbel, wait_s: float = 0) -> dict[str, str]:
    result = umbel.AsyncResult(task_id)
    if wait_s:
        return {"outcome": await result.aget(timeout=wait_s)}
    return {"state": await result.astate()}
