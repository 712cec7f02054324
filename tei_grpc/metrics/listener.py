"""The HTTP listener that shows the metrics."""

import logging
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tei_grpc.errors import StartupError
from tei_grpc.metrics.server import Metrics

RETRY_SECONDS = 0.1

logger = logging.getLogger(__name__)


class MetricsListener:
    """Serves `Metrics` over HTTP from a thread: `/health` says OK, every other path shows the metrics."""

    def __init__(self, metrics: Metrics, hostname: str, port: int) -> None:
        """Bind; raises StartupError when the address is taken or not ours."""
        try:
            self._server = _server_class(hostname)((hostname, port), _handler_class(metrics))
        except OSError as error:
            raise StartupError(
                f"`--prometheus-port` (PROMETHEUS_PORT): cannot listen on {hostname}:{port}: {error.strerror}"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def address(self) -> str:
        """The address really bound, as `host:port`."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _server_class(hostname: str) -> type[socketserver.ThreadingTCPServer]:
    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, object]:
            try:
                return super().get_request()
            except OSError:  # no file descriptor is left: asked again at once, the system would say the same for ever
                time.sleep(RETRY_SECONDS)
                raise

        def handle_error(self, request: object, client_address: object) -> None:
            logger.debug("A scrape was not finished", exc_info=True)

    return Server


def _handler_class(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds; a peer that sends nothing must not keep its thread

        def do_GET(self) -> None:
            body = b"OK" if self.path == "/health" else metrics.render()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    return Handler
