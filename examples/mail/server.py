"""An SMTP server to try things with: it keeps nothing, and it is moody in a way that can be repeated.

How often it turns a recipient away depends on the name alone: not at all, once or twice. The first
time it asks to come back later, the second time it hangs up. It does not know anybody at nowhere.example.
"""

import asyncio
import zlib
from collections import Counter

from tasks import HOST, PORT

LINES_MAX = 10_000


class MoodyServer:
    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except ConnectionError:
            pass  # the client hung up
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = "220 moody.example"
        while reply:
            writer.write(f"{reply}\r\n".encode())
            await writer.drain()
            line = (await reader.readline()).decode().strip()
            match line.upper().split(maxsplit=1)[:1]:
                case ["RCPT"]:
                    reply = self._judge(line.partition("<")[2].partition(">")[0])
                case ["DATA"]:
                    writer.write(b"354 go ahead\r\n")
                    reply = await _swallow(reader)
                case ["QUIT"]:
                    writer.write(b"221 bye\r\n")
                    reply = ""
                case []:  # the client is gone
                    reply = ""
                case _:
                    reply = "250 ok"

    def _judge(self, recipient: str) -> str:
        if recipient.endswith("@nowhere.example"):
            return "550 no such mailbox"
        self.attempts[recipient] += 1
        if self.attempts[recipient] > zlib.crc32(recipient.encode()) % 3:
            return "250 ok"
        return "451 come back later" if self.attempts[recipient] == 1 else ""


async def _swallow(reader: asyncio.StreamReader) -> str:
    for _ in range(LINES_MAX):
        if await reader.readline() in (b".\r\n", b""):
            return "250 taken"
    return "552 too long"


async def main() -> None:
    server = await asyncio.start_server(MoodyServer().serve, HOST, PORT)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
