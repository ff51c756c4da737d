"""A server that answers as a test says, and counts bytes taken and clients gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

__all__ = ["NO_SUCH_KEY", "Answer", "ScriptedServer", "refusal"]

CHUNK = bytes(1 << 16)


class Answer(NamedTuple):
    """An answer: `length` bytes are announced; the content, or zeros up to `sent`, follow."""

    status: int
    content: bytes = b""
    length: int | None = None
    sent: int = 0


def refusal(status: int, code: str, message: str = "because of the test") -> Answer:
    """An error as S3 words it."""
    return Answer(
        status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    )


NO_SUCH_KEY = refusal(404, "NoSuchKey")


class ScriptedServer:
    """Runs `script(verb, path)` for every request; None never answers.

    Attributes:
        n_sent: bytes of content that clients took.
        n_gone: clients that hung up on an answer that never came.
    """

    def __init__(self, script: Callable[[str, str], Answer | None]) -> None:
        self.script = script
        self.n_sent = 0
        self.n_gone = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                told = server.script(self.command, self.path)
                if told is None:
                    self.rfile.read(1)
                    server.n_gone += 1
                    self.close_connection = True
                    return
                length = len(told.content) if told.length is None else told.length
                self.send_response(told.status)
                self.send_header("Content-Length", str(length))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Mon, 02 Nov 2026 00:00:00 GMT")
                self.end_headers()
                try:
                    self.wfile.write(told.content)
                    for _ in range(0, told.sent, len(CHUNK)):
                        self.wfile.write(CHUNK)
                        server.n_sent += len(CHUNK)
                except OSError:
                    self.close_connection = True
                if length != len(told.content) + told.sent:
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_POST = answer  # noqa: N815 - names of the base class

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def url(self, options: str = "") -> str:
        """A store of kvgraft in its bucket, which it says to have."""
        port = self._server.server_address[1]
        return f"s3:pages/here?endpoint=http://127.0.0.1:{port}{options}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
