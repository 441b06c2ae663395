"""What every broker promises about knowing of a node that others do not hear."""

from tests.brokers.under_test import LONG_S, SHORT_LEASE_S, BrokerUnderTest, eventually, needs, run
from umbel.brokers.interface import Evidence

CONTROL = "celery.pidbox"
NODE = "ada@here"


class MarksContract:
    @needs("marks")
    def test_a_node_that_listens_and_marks_itself_is_alive_until_it_is_gone(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as peer:
                async with under_test.open() as broker, broker.subscribe(CONTROL, [NODE]):
                    await broker.mark_alive(NODE, 7, ttl_s=LONG_S)
                    assert await peer.probe(NODE) is Evidence.ALIVE
                    assert await peer.probe(NODE, 7) is Evidence.ALIVE
                    assert await broker.probe(NODE, 7) is Evidence.ALIVE
                    await broker.mark_alive(NODE, 7, ttl_s=SHORT_LEASE_S)

                async def silent() -> bool:
                    return await peer.probe(NODE, 7) is not Evidence.ALIVE

                await eventually(silent, what="the end of its mark")

        run(scenario())

    @needs("fanout")
    def test_a_node_that_was_never_there_is_not_alive(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                assert await broker.probe("nobody@nowhere", 7) is not Evidence.ALIVE

        run(scenario())
