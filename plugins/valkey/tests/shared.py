"""Servers that several tests use, started when one first needs them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

from .servers import Cluster, Server

__all__ = ["close", "cluster", "evicting", "full", "single"]

_OPEN = ExitStack()


def _kept(server: Server) -> Server:
    _OPEN.callback(server.close)
    return server


@cache
def single() -> Server:
    """A server without limits but a short one for values."""
    return _kept(Server(**{"proto-max-bulk-len": "2mb"}))


@cache
def evicting() -> Server:
    """A server of 16 MiB that makes room by itself."""
    settings = {"maxmemory-policy": "allkeys-lru", "maxmemory-samples": "64"}
    return _kept(Server(maxmemory="16mb", **settings))


@cache
def full() -> Server:
    """A server of 8 MiB that does not."""
    return _kept(Server(maxmemory="8mb", **{"maxmemory-policy": "noeviction"}))


@cache
def durable() -> Server:
    """A server that has acknowledged writes on its disk."""
    return _kept(Server(appendonly="yes", appendfsync="always"))


@cache
def cluster() -> Cluster:
    """Three primaries."""
    made = Cluster()
    _OPEN.callback(made.close)
    return made


def close() -> None:
    """End all of them."""
    _OPEN.close()
    for each in (single, evicting, full, durable, cluster):
        each.cache_clear()
