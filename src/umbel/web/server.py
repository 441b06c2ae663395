"""Serving the dashboard by itself, with uvicorn."""

from collections.abc import Callable
from socket import socket

import uvicorn

from umbel.app.app import App
from umbel.errors import ConfigurationError
from umbel.web.application import application
from umbel.web.dashboard import Dashboard
from umbel.web.settings import WebSettings

CONNECTIONS_MAX = 1500
STOP_S = 3


class Server(uvicorn.Server):
    """`opened` is called with the first URL once it can be opened."""

    def __init__(self, app: App, settings: WebSettings, opened: Callable[[str], None]) -> None:
        self._opened = opened
        self.dashboard = Dashboard(app, settings)
        config = uvicorn.Config(
            application(self.dashboard),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who is trusted is decided by the gate
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_S,
            lifespan="on",
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's word for an address that it cannot have
            place = f"{self.config.host}:{self.config.port}"
            raise ConfigurationError(
                f"the dashboard cannot listen at {place}: the address is in use or not on this machine; "
                "choose another --port or --host"
            ) from None
        if self.started:
            self._opened(self.first_url)

    @property
    def address(self) -> str:
        """Where it listens; known once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def first_url(self) -> str:
        """The one-time URL, or the plain address where there is no such token."""
        token = self.dashboard.visitors.one_time
        return f"{self.address}/session?token={token}" if token else f"{self.address}/"
