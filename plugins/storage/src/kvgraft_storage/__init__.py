"""Stores: keys, payloads and backends; usable alone, and used by a cache's storage tier.

keys, canonical     names of data: page hashes and storage keys
payload, memory     a payload's header, the check of data that comes back, and its memory
backend, driver     the interface of a backend, and how one is found and opened
supervised          a scheduler's client, `Storage`: attachment, calls, workers, ticket
completions         one queue for all tickets
events, hints       changes of a store, and guesses of presence without a call to it
engines, weights    what adapters for foreign engines share
files               files that are written whole or not at all
"""

from __future__ import annotations

from kvgraft_storage.backend import (
    Capabilities,
    Damage,
    ScatteredValue,
    StorageBackend,
    StoreStats,
    Value,
    VerifyReport,
)
from kvgraft_storage.breaker import Access, BreakerState
from kvgraft_storage.completions import Completions
from kvgraft_storage.counters import Counters
from kvgraft_storage.driver import (
    STORAGE_API,
    STORAGE_GROUP,
    FoundDriver,
    StorageDriver,
    StorageOptions,
    discover_storage,
    open_existing_storage,
    open_storage,
)
from kvgraft_storage.engines import EngineInterface, StoreSettings
from kvgraft_storage.events import Change, EventLog, StoreEvent
from kvgraft_storage.keys import Address, Fingerprint, PageChain
from kvgraft_storage.limits import SupervisionLimits
from kvgraft_storage.memory import (
    BLOCK_NBYTES,
    aligned,
    copy,
    gather,
    is_aligned,
    round_up,
    scatter,
)
from kvgraft_storage.payload import HEADER_NBYTES, Header, damage, decode_header
from kvgraft_storage.settings import PrefetchPolicy, StorageSettings, StorePolicy
from kvgraft_storage.status import TRANSIENT, WRONG, Status
from kvgraft_storage.supervised import Storage
from kvgraft_storage.ticket import StorageTicket
from kvgraft_storage.weights import model_files, weights_of

__all__ = [
    "BLOCK_NBYTES",
    "HEADER_NBYTES",
    "STORAGE_API",
    "STORAGE_GROUP",
    "TRANSIENT",
    "WRONG",
    "Access",
    "Address",
    "BreakerState",
    "Capabilities",
    "Change",
    "Completions",
    "Counters",
    "Damage",
    "EngineInterface",
    "EventLog",
    "Fingerprint",
    "FoundDriver",
    "Header",
    "PageChain",
    "PrefetchPolicy",
    "ScatteredValue",
    "Status",
    "Storage",
    "StorageBackend",
    "StorageDriver",
    "StorageOptions",
    "StorageSettings",
    "StorageTicket",
    "StoreEvent",
    "StorePolicy",
    "StoreSettings",
    "StoreStats",
    "SupervisionLimits",
    "Value",
    "VerifyReport",
    "aligned",
    "copy",
    "damage",
    "decode_header",
    "discover_storage",
    "gather",
    "is_aligned",
    "model_files",
    "open_existing_storage",
    "open_storage",
    "round_up",
    "scatter",
    "weights_of",
]
