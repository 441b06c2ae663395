"""Which AMQP client costs the least CPU per message? For decision 0012; needs `pip install amqp aiormq`.

Usage: python benchmarks/_amqp_clients.py amqp://guest:guest@127.0.0.1:5672//

Each client publishes COUNT task messages with confirms in batches, then consumes them with a
prefetch of 1000 and one ack (`multiple`) for every 100, as a worker would, the headers decoded.
What is printed is CPU time of this process per message, in microseconds.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

COUNT, PREFETCH, ACK_EVERY, BATCH = 20_000, 1000, 100, 500
QUEUE = "umbel.bench.clients"
HEADERS: dict[str, Any] = {
    "lang": "py", "task": "tasks.add", "id": "2a91b34a-34ae-4cce-8eb3-93671edda338", "shadow": None,
    "eta": None, "expires": None, "group": None, "group_index": None, "retries": 0, "timelimit": [None, None],
    "root_id": "2a91b34a-34ae-4cce-8eb3-93671edda338", "parent_id": None, "argsrepr": "(2,)",
    "kwargsrepr": "{'y': 3}", "origin": "gen31794@vm", "ignore_result": False, "replaced_task_nesting": 0,
    "stamped_headers": None, "stamps": {},
}  # fmt: skip
BODY = json.dumps(
    [[2], {"y": 3}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
).encode()
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2, "priority": 0,
    "correlation_id": HEADERS["id"], "headers": HEADERS,
}  # fmt: skip


async def with_umbel(url: str) -> tuple[float, float]:
    from umbel.brokers.amqp.envelope import Properties, decode_properties, encode_properties
    from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_publish
    from umbel.brokers.amqp.handshake import locations_from_url
    from umbel.brokers.amqp.link import open_link

    link = await open_link(locations_from_url(url)[0], timeout_s=4, heartbeat_s=10, name="bench")
    channel = await link.channel(confirms=True)
    await channel.call(Method.QUEUE_DECLARE, 0, QUEUE, False, True, False, False, False, {})
    began = time.process_time()
    for _ in range(COUNT // BATCH):
        properties = [encode_properties(Properties(**PROPERTIES)) for _ in range(BATCH)]
        frames = [encode_publish(channel.number, "", QUEUE, one, BODY) for one in properties]
        await channel.answered(channel.publish(frames, list))
    published, seen, done = time.process_time() - began, 0, asyncio.Event()
    consumer = await link.channel()

    def on_delivery(incoming: Incoming) -> None:
        nonlocal seen
        decode_properties(incoming.properties)
        seen += 1
        if seen % ACK_EVERY == 0:
            consumer.send(encode_ack(consumer.number, incoming.fields[1], multiple=True))
        if seen == COUNT:
            done.set()

    consumer.on_delivery = on_delivery
    began = time.process_time()
    await consumer.call(Method.BASIC_QOS, 0, PREFETCH, True)
    await consumer.call(Method.BASIC_CONSUME, 0, QUEUE, "c", False, False, False, False, {})
    await done.wait()
    consumed = time.process_time() - began
    await link.close()
    return published, consumed


async def with_aiormq(url: str) -> tuple[float, float]:
    import aiormq
    from aiormq.abc import DeliveredMessage

    connection = await aiormq.connect(url)
    channel = await connection.channel(publisher_confirms=True)
    await channel.queue_declare(QUEUE, durable=True)
    began = time.process_time()
    for _ in range(COUNT // BATCH):
        await asyncio.gather(
            *(
                channel.basic_publish(
                    BODY, routing_key=QUEUE, properties=aiormq.spec.Basic.Properties(**PROPERTIES)
                )
                for _ in range(BATCH)
            )
        )
    published, seen, done = time.process_time() - began, 0, asyncio.Event()

    async def on_message(message: DeliveredMessage) -> None:
        nonlocal seen
        seen += 1
        if seen % ACK_EVERY == 0:
            assert message.delivery_tag is not None
            await channel.basic_ack(message.delivery_tag, multiple=True)
        if seen == COUNT:
            done.set()

    began = time.process_time()
    await channel.basic_qos(prefetch_count=PREFETCH)
    await channel.basic_consume(QUEUE, on_message)
    await done.wait()
    consumed = time.process_time() - began
    await connection.close()
    return published, consumed


async def with_amqp(url: str) -> tuple[float, float]:
    import amqp  # type: ignore[import-untyped]

    from umbel.brokers.amqp.handshake import locations_from_url

    place = locations_from_url(url)[0]
    connection = amqp.Connection(
        f"{place.host}:{place.port}", userid=place.user, password=place.password, virtual_host=place.vhost
    )
    connection.connect()
    channel = connection.channel()
    channel.confirm_select()
    channel.queue_declare(QUEUE, durable=True, auto_delete=False)
    confirmed = 0

    def on_confirm(tag: int, _: bool) -> None:
        nonlocal confirmed
        confirmed = max(confirmed, tag)

    channel.events["basic_ack"].add(on_confirm)
    began = time.process_time()
    for sent in range(BATCH, COUNT + 1, BATCH):
        for _ in range(BATCH):
            channel.basic_publish(amqp.Message(BODY, application_headers=HEADERS), routing_key=QUEUE)
        while confirmed < sent:
            connection.drain_events()
    published, seen, done = time.process_time() - began, 0, asyncio.Event()

    def on_message(message: Any) -> None:
        nonlocal seen
        seen += 1
        if seen % ACK_EVERY == 0:
            channel.basic_ack(message.delivery_tag, multiple=True)
        if seen == COUNT:
            done.set()

    def on_readable() -> None:
        # It blocks on a frame that came in part; here that only makes it look better.
        connection.drain_events()

    channel.basic_qos(0, PREFETCH, True)
    began = time.process_time()
    channel.basic_consume(QUEUE, callback=on_message)
    asyncio.get_running_loop().add_reader(connection.sock, on_readable)
    await done.wait()
    consumed = time.process_time() - began
    asyncio.get_running_loop().remove_reader(connection.sock)
    connection.close()
    return published, consumed


CLIENTS: dict[str, Callable[[str], Coroutine[None, None, tuple[float, float]]]] = {
    "umbel frames": with_umbel,
    "py-amqp": with_amqp,
    "aiormq": with_aiormq,
}


def main(url: str) -> None:
    print(f"{'client':14} {'publish':>10} {'consume':>10}   µs of CPU per message")
    for name, client in CLIENTS.items():
        published, consumed = (1e6 * seconds / COUNT for seconds in asyncio.run(client(url)))
        print(f"{name:14} {published:10.1f} {consumed:10.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
