"""Requests to one bucket: concurrent, each with a time limit.

Requests run on threads of this module; obstore releases the interpreter lock while they wait. Its
coroutines would need only one thread, but a process that ends shortly after a failed one is
sometimes aborted (obstore 0.12.1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.store import S3Store

from kvgraft_s3.location import Location
from kvgraft_s3.options import S3Options

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

__all__ = ["Client"]

T = TypeVar("T")

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables for the endpoint, if the options do not give it."""

CHUNK = 1000
"""Objects that one request lists or deletes at most."""


class Client:
    """A bucket below a prefix; paths are relative to that.

    Args:
        location: bucket and prefix.
        options: endpoint, region, concurrency and time limits.
    """

    def __init__(self, location: Location, options: S3Options) -> None:
        limit = timedelta(seconds=options.timeout_s)
        config: S3Config = {}
        client: ClientConfig = {"timeout": limit, "connect_timeout": limit}
        if options.region:
            config["region"] = options.region
        endpoint = options.endpoint or next(filter(None, map(os.environ.get, ENDPOINTS)), None)
        if endpoint:
            config["aws_endpoint_url_s3"] = endpoint  # this one overrides the others
            client["allow_http"] = endpoint.startswith("http://")
        self._store = S3Store(
            location.bucket,
            prefix=location.prefix or None,
            config=config,
            client_options=client,
            retry_config={"max_retries": options.retries, "retry_timeout": limit},
        )
        self._threads = ThreadPoolExecutor(options.connections, "kvgraft-s3")

    def close(self) -> None:
        """Send no more requests; those in flight end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def each(
        self, request: Callable[..., T], deadline_s: float, *arguments: Sequence[object]
    ) -> Sequence[T | Exception]:
        """Make concurrent requests; returns their results, in order.

        Args:
            request: called with one element of each sequence.
            deadline_s: seconds until unfinished requests are given up, as `TimeoutError`.
            arguments: sequences of equal length.
        """
        if deadline_s <= 0:
            return [TimeoutError("no time left") for _ in arguments[0]]
        futures = [self._threads.submit(request, *each) for each in zip(*arguments)]
        wait(futures, deadline_s)
        return list(map(_outcome, futures))

    # -- requests

    def get(self, path: str, nbytes: int) -> memoryview | int:
        """Read an object of this length; of one with another length only read the length."""
        found = obstore.get(self._store, path)
        size = found.meta["size"]
        return memoryview(found.bytes()) if size == nbytes else size

    def read(self, path: str) -> memoryview:
        """An object of any length."""
        return memoryview(obstore.get(self._store, path).bytes())

    def put(self, path: str, content: bytes) -> None:
        """Store an object whole, in one request."""
        obstore.put(self._store, path, content, use_multipart=False)

    def head(self, path: str) -> int:
        """The length of an object."""
        return obstore.head(self._store, path)["size"]

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, a thousand per request; missing ones are no error."""
        obstore.delete(self._store, list(paths))

    def list(self) -> Iterator[list[tuple[str, int]]]:
        """Paths and lengths of everything below the prefix, a request per step."""
        for found in obstore.list(self._store, chunk_size=CHUNK):
            yield [(each["path"], each["size"]) for each in found]


def _outcome(future: Future[T]) -> T | Exception:
    future.cancel()
    if not future.done():
        return TimeoutError("no answer in time")
    try:
        return future.result()
    except CancelledError:
        return TimeoutError("not begun in time")
    except Exception as error:  # noqa: BLE001 - told to the caller, which interprets it
        return error
