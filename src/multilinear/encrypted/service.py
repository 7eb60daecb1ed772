"""A small HTTP service around `Server`: clients send evaluation keys once, then encrypted images.

    GET  /program   what a client needs to know, as JSON
    POST /keys      evaluation keys; the answer is their id
    POST /run       encrypted images; the answer is the encrypted result

Plain HTTP, one request at a time: put TLS and whoever may call in front of it.
"""

import hashlib
import json
import logging
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from multilinear.encrypted import messages
from multilinear.encrypted.program import Program
from multilinear.encrypted.server import Server
from multilinear.errors import MultilinearError

MOST_CLIENTS = 8  # whose keys are kept; the one not seen for longest goes first
MOST_BATCHES = 16  # in one request
SOCKET_SECONDS = 60.0

log = logging.getLogger(__name__)


class Service:
    """Answers requests for one program: `handle` takes bytes and gives bytes, whatever carries them."""

    def __init__(self, program: Program, processes: int | None = None) -> None:
        program.check()
        self.program, self.processes = program, processes
        self.clients: OrderedDict[bytes, tuple[bytes, Server]] = OrderedDict()  # the keys' hash, by their id

    def limit(self, path: str) -> int:
        """The longest body that a request to `path` may have."""
        public = self.program.public
        sizes = {
            "/keys": messages.largest_keys(public),
            "/run": MOST_BATCHES * messages.batch_bytes(public),
        }
        return sizes.get(path, 0) + messages.HEADER_BYTES

    def handle(self, path: str, body: bytes) -> tuple[int, bytes]:
        """A status and an answer. Errors of the client's are one line; the service goes on."""
        try:
            if path == "/program":
                return 200, json.dumps(
                    {"format": "multilinear-client", "version": 1, **self.program.public.as_dict()}
                ).encode()
            if path == "/keys":
                server, digest = Server(self.program, body, self.processes), hashlib.sha256(body).digest()
                if self.clients.get(server.client, (digest,))[0] != digest:
                    raise MultilinearError("other keys with this id are here already; make new ones with keygen")
                self.clients[server.client] = digest, server
                while len(self.clients) > MOST_CLIENTS:
                    self.clients.popitem(last=False)
                return 200, server.client.hex().encode()
            if path == "/run":
                owner = messages.unpack(body, messages.IMAGES, self.program.public).keys
                found = self.clients.get(owner)
                if found is None:
                    raise MultilinearError(f"no evaluation keys {owner.hex()[:8]} here; send them to /keys first")
                self.clients.move_to_end(owner)
                for other, (_, server) in self.clients.items():
                    if other != owner:
                        server.release()  # one client's working memory at a time
                return 200, found[1].run(body)
        except MultilinearError as error:
            return 400, str(error).encode()
        return 404, b"there are /program, /keys and /run"


def make_server(service: Service, host: str = "127.0.0.1", port: int = 8000) -> HTTPServer:
    """An HTTP server that answers with `service`; call `serve_forever` on it."""

    class Handler(BaseHTTPRequestHandler):
        timeout = SOCKET_SECONDS

        def do_GET(self) -> None:
            self._answer(*service.handle(self.path if self.path == "/program" else "", b""))

        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", ""))
            except ValueError:
                return self._answer(411, b"say how long the message is")
            most = service.limit(self.path)
            if not 0 <= length <= most:
                self.close_connection = True
                return self._answer(413, f"{length} bytes are too many, at most {most} are taken".encode())
            body = self.rfile.read(length)
            if len(body) < length:
                return self._answer(400, b"the message is truncated")
            try:
                return self._answer(*service.handle(self.path, body))
            except Exception:  # a fault of ours must not end the service
                log.exception("request failed")
                return self._answer(500, b"the server failed on this message; its log says why")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            log.info(format, *arguments)

    try:
        return HTTPServer((host, port), Handler)
    except OSError as error:
        raise MultilinearError(f"cannot listen on {host}:{port}: {error}") from error
