"""An app that leaves behind, at its import, everything that a forked copy cannot use.

In the test's own process, which only sends, it leaves nothing.
"""

import os
import socket
import ssl
import threading
from typing import Any

import grpc

from umbel import App

app = App("unsafe")
say: Any = None
secure: Any = None
replies: Any = None

if "ECHO_GRPC" in os.environ:
    threading.Thread(target=threading.Event().wait, name="metrics", daemon=True).start()
    channel = grpc.insecure_channel(f"127.0.0.1:{os.environ['ECHO_GRPC']}")
    say = channel.unary_unary("/echo.Echo/Say")
    say(b"at import", timeout=20)  # it is in use: it has threads and a connection
    context = ssl.create_default_context(cafile=os.environ["ECHO_AUTHORITY"])
    link = socket.create_connection(("127.0.0.1", int(os.environ["ECHO_TLS"])), 20)
    secure = context.wrap_socket(link, server_hostname="127.0.0.1")
    replies = secure.makefile("rb")


@app.task
def converse(text: str) -> tuple[int, str, str]:
    """Say it over both connections of this process; what came back, and who asked."""
    by_grpc: bytes = say(text.encode(), timeout=20)
    secure.sendall(text.encode() + b"\n")
    return os.getpid(), by_grpc.decode(), replies.readline().decode().strip()
