"""TLS in front of a server that need not speak it: not every build of a server does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator

from .servers import HOST

__all__ = ["tls_front"]


@contextlib.contextmanager
def tls_front(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """A port that speaks TLS and passes everything on to another, without TLS."""
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection(HOST, port)
        await asyncio.gather(_pass_on(reader, plain_writer), _pass_on(plain_reader, writer))

    front = loop.run_until_complete(asyncio.start_server(serve, HOST, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield front.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_end(front), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while told := await reader.read(1 << 16):
            writer.write(told)
            await writer.drain()
    writer.close()


async def _end(front: asyncio.Server) -> None:
    front.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
