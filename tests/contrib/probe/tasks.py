"""Tasks that say which connection they have."""

import asyncio

from asgiref.sync import sync_to_async
from django.db import transaction

from probe.apps import ProbeConfig, backend_pid
from umbel.contrib.django import app

AT_IMPORT = backend_pid()
both = asyncio.Barrier(2)


@app.task
def backend() -> tuple[int, list[int]]:
    """Its connection, and those of the process that was before it."""
    with transaction.atomic():
        return backend_pid(), [ProbeConfig.at_setup, AT_IMPORT]


@app.task
async def awaited_backend() -> tuple[int, list[int]]:
    return await sync_to_async(backend)()


@app.task
async def backend_of_two() -> tuple[int, int]:
    """Two run at once; the other one changes nothing about this one's connection."""
    first = await sync_to_async(backend_pid)()
    async with asyncio.timeout(60):
        await both.wait()
    return first, await sync_to_async(backend_pid)()
