"""TLS in front of a server that need not speak it: not every build of a server does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"

__all__ = ["tls_front"]


@contextlib.contextmanager
def tls_front(port: int, certificate: Path) -> Iterator[int]:
    """A port that speaks TLS and passes everything on to another, without TLS.

    A process of its own serves it: its connections end with it, at whatever point they are.

    Args:
        port: port of ``HOST`` that is passed on to.
        certificate: PEM file of the private key and its certificates.
    """
    command = [sys.executable, __file__, str(port), str(certificate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        try:
            assert front.stdout is not None
            yield int(front.stdout.readline())
        finally:
            front.kill()


async def _serve(port: int, certificate: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection(HOST, port)
        await asyncio.gather(_pass_on(reader, plain_writer), _pass_on(plain_reader, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    front = await asyncio.start_server(serve, HOST, ssl=context)
    sys.stdout.write(f"{front.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await front.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while told := await reader.read(1 << 16):
            writer.write(told)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
