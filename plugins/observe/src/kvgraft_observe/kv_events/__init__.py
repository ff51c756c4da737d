"""A cache's events as vLLM publishes its own, so that routers made for vLLM can route to it.

wire          the messages, as msgpack
resumable     the blocks up to which requests could resume, of all components together
translating   makes them of the cache's events
replaying     keeps the last ones for subscribers that missed some
publisher     sends them over ZMQ

Needs the extra `kv-events`: pyzmq and msgspec.
"""

from __future__ import annotations

from kvgraft_observe.kv_events.publisher import KvEventPublisher, expect_addresses
from kvgraft_observe.kv_events.translating import Names, Report, names_of

__all__ = ["KvEventPublisher", "Names", "Report", "expect_addresses", "names_of"]
