"""Settings of a cache's storage tier."""

from __future__ import annotations

import enum

from pydantic import Field, PositiveFloat

from kvgraft.refusals import SettingsModel, checked
from kvgraft.sizes import Nbytes, Tokens

__all__ = ["PrefetchPolicy", "StorageSettings", "StorePolicy", "storage_settings"]


class StorePolicy(str, enum.Enum):
    """When data on HOST is stored in STORAGE as well."""

    SECOND_TOUCH = "second-touch"
    """When a prefix is used again; a prefix used once does not wear the disk."""
    WRITE_THROUGH = "write-through"
    """As soon as HOST has acknowledged it."""
    HOST_EVICTION = "host-eviction"
    """When it leaves HOST; a copy is stored, so that no eviction waits."""


class PrefetchPolicy(str, enum.Enum):
    """The time a queued request waits for its data from STORAGE (S6)."""

    BEST_EFFORT = "best-effort"
    """Not at all: it begins with the pages that have arrived."""
    WAIT_COMPLETE = "wait-complete"
    """Until the fetch has ended; the store's deadlines and `queue_timeout_s` bound it."""
    TIMEOUT = "timeout"
    """At most `prefetch_timeout_s`."""


class StorageSettings(SettingsModel):
    """Settings of the storage tier.

    Attributes:
        url: the store, such as `file:/var/cache/kvgraft?capacity=10GiB`; None to attach one later.
        model: name of the model; with `weights`, `sharding` and `salt` it identifies the data.
        weights: revision of its weights, such as a commit or a digest.
        sharding: which part of the model's cache this process holds, such as `"tp0/8"`; processes
            whose data is equal use one value and share it.
        salt: anything else that must tell data apart.
        store: when data goes to the store.
        store_nbytes: most bytes on their way there, plus one node; others wait.
        prefetch: how long requests wait for it.
        prefetch_timeout_s: for the policy `timeout`.
        prefetch_nbytes: most bytes of HOST that prefetches hold (S2).
        threshold_tokens: fewer tokens than this are not worth fetching.
        deadline_s: longest time for one call of the store, from when it begins.
        queue_timeout_s: longest time for which a prefetch or a node waits for its turn at the store
            while nothing of it is served, for which a prefetch waits for room on HOST, and for
            which fetched data is kept there until its request begins.
    """

    url: str | None = None
    model: str = Field(min_length=1, examples=["my-model"])
    weights: str = Field(min_length=1, examples=["rev-1"])
    sharding: str | None = None
    salt: str | None = None
    store: StorePolicy = StorePolicy.SECOND_TOUCH
    store_nbytes: Nbytes = Field(default=256 << 20, ge=1)
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_timeout_s: PositiveFloat = 1.0
    prefetch_nbytes: Nbytes = Field(default=1 << 30, ge=1)
    threshold_tokens: Tokens = Field(default=256, gt=0)
    deadline_s: PositiveFloat = 10.0
    queue_timeout_s: PositiveFloat = 60.0


def storage_settings(given: object) -> StorageSettings:
    """The setting `storage` of a cache; for a pydantic validator."""
    return checked(StorageSettings, given, "storage")
