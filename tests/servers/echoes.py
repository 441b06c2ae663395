"""Two servers that say what they hear, one with gRPC and one with TLS; prints their ports and waits.

Arguments: the server's certificate and its key.
"""

import json
import socketserver
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

METHOD = "/echo.Echo/Say"


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, call: Any) -> Any:
        return (
            grpc.unary_unary_rpc_method_handler(lambda said, _context: said)
            if call.method == METHOD
            else None
        )


class _Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


class _TlsServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        link, address = super().get_request()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*sys.argv[1:3])
        return context.wrap_socket(link, server_side=True), address


def main() -> None:
    grpc_server = grpc.server(ThreadPoolExecutor(4), handlers=[_Handler()])
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    with _TlsServer(("127.0.0.1", 0), _Echo) as tls_server:
        print(json.dumps({"grpc": grpc_port, "tls": tls_server.server_address[1]}), flush=True)
        tls_server.serve_forever()


if __name__ == "__main__":
    main()
