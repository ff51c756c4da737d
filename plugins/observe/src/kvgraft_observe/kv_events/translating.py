"""Translates a cache's events to vLLM's.

A component is what vLLM calls a cache group. A block's name is the last 8 bytes of its page's hash
as an integer, as in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple, get_args

from kvgraft import Cache, ChunkedLocal, ConfigError, Everything, Reach, Tier, Trailing
from kvgraft.refusals import shown
from kvgraft.tree.component import Cause
from kvgraft_observe.arguments import expect_cache, expect_callable, expect_names
from kvgraft_observe.events import Cleared, Event, Evicted, Moved, Pages, Stored
from kvgraft_observe.kv_events.resumable import Resumable
from kvgraft_observe.kv_events.wire import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored

__all__ = ["Group", "Names", "Report", "Translator", "WireEvent", "names_of"]

logger = logging.getLogger("kvgraft")

WireEvent = BlockStored | BlockRemoved | AllBlocksCleared

MEDIA = {Tier.DEVICE: GPU, Tier.HOST: CPU}

Report = Literal["components", "resumable"]
"""The blocks of every component, or those up to which requests could resume, as one group."""

INT_NBYTES = 8
"""Bytes of a hash that are a block's name."""


class Names(NamedTuple):
    """A namespace in terms of a router.

    Attributes:
        lora_name: the LoRA adapter of the namespace's requests.
        cache_salt: the `cache_salt` that they are sent with.
    """

    lora_name: str | None = None
    cache_salt: str | None = None


def names_of(namespace: object) -> Names:
    """Take any namespace for a cache salt: a string as it is, others by their `repr`."""
    if namespace is None:
        return Names()
    return Names(cache_salt=namespace if isinstance(namespace, str) else repr(namespace))


class Group(NamedTuple):
    """A component as a cache group.

    Attributes:
        number: its index among the components.
        kind: its kind of attention, as vLLM calls it.
        window: tokens of a sliding window.
    """

    number: int
    kind: str
    window: int | None


ONE_GROUP = Group(0, "full_attention", None)
"""The group of all components together, of a kind that every router indexes."""


def _kind(reach: Reach) -> tuple[str, int | None]:
    """The kind of attention of a reach, and its window."""
    if reach.is_state:
        return "mamba", None
    if any(isinstance(term, Everything) for term in reach.terms):
        return "full_attention", None
    if len(reach.terms) == 1 and isinstance(reach.terms[0], Trailing):
        return "sliding_window", reach.terms[0].tokens
    if len(reach.terms) == 1 and isinstance(reach.terms[0], ChunkedLocal):
        return "chunked_local_attention", None
    return "unknown", None


class Translator:
    """Translates the events of one cache.

    Args:
        cache: the cache.
        components: those whose blocks are reported; None for all.
        names: names a namespace. If it raises, the namespace's blocks are left out; the first time
            is logged.
        report: `resumable` for one group of full attention, with the blocks up to which requests
            could resume.

    Attributes:
        groups: the components that are reported, as cache groups.
        unnamed: how often `names` raised.

    Raises:
        ConfigError: no cache, a component that the cache does not have, or none at all; components
            beside `resumable`, which is of all of them.
    """

    def __init__(
        self,
        cache: Cache,
        components: Collection[str] | None = None,
        names: Callable[[object], Names] = names_of,
        report: Report = "components",
    ) -> None:
        expect_cache("KV events", cache)
        if report not in get_args(Report):
            raise ConfigError(
                f"KV events: report={shown(report)}; give 'components' or 'resumable'"
            )
        if report == "resumable" and components is not None:
            raise ConfigError(
                f"KV events: components={shown(components)} with report='resumable', which is of "
                "all components; leave one of them out"
            )
        expect_callable("KV events: names", names, "a function from a namespace to Names")
        if components is not None:
            expect_names("KV events: components", components, cache.tree.components[0].name)
        groups = {
            component.name: Group(component.index, *_kind(component.reach))
            for component in cache.tree.components
        }
        if components is not None:
            unknown = [name for name in components if name not in groups]
            if unknown or not components:
                named = f"component {unknown[0]!r} is not" if unknown else "no component is named"
                raise ConfigError(
                    f"KV events: {named} in this cache; it has {', '.join(groups)}; leave "
                    "components out for all"
                )
        self.groups = {
            name: group
            for name, group in groups.items()
            if components is None or name in components
        }
        self._page_size = cache.config.page_size
        self._names = names
        self._resumable: Resumable | None = None
        if report == "resumable":
            self._resumable = Resumable(cache.tree.components, self._page_size)
        self.unnamed = 0

    def translate(self, events: list[Event]) -> Iterator[WireEvent]:
        """The same events for a router; hits and events of other components are left out."""
        for event in events:
            if isinstance(event, Cleared):
                if self._resumable is not None:
                    self._resumable.clear()
                yield AllBlocksCleared()
            elif isinstance(event, (Stored, Moved, Evicted)) and event.component in self.groups:
                if self._resumable is not None:
                    yield from self._changes(event, self._resumable)
                elif isinstance(event, Evicted):
                    group = self.groups[event.component]
                    yield _removed(group, event.tier, event.pages, event.cause)
                else:
                    yield from self._told(self.groups[event.component], event.tier, event.pages)

    def _changes(
        self, event: Stored | Moved | Evicted, resumable: Resumable
    ) -> Iterator[WireEvent]:
        """The blocks that an event makes resumable, or not resumable any more."""
        for change in resumable.apply(event):
            if isinstance(event, Evicted):
                yield _removed(ONE_GROUP, change.tier, change.pages, event.cause)
            else:
                yield from self._told(ONE_GROUP, change.tier, change.pages)

    def _told(self, group: Group, tier: Tier, pages: Pages) -> Iterator[BlockStored]:
        names = self._named(pages.namespace)
        if names is not None:
            yield self._stored(group, tier, pages, names)

    def _named(self, namespace: object) -> Names | None:
        try:
            return self._names(namespace)
        except Exception as error:  # noqa: BLE001 - others' code; routers know less, that is all
            self.unnamed += 1
            if self.unnamed == 1:
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
                logger.warning(
                    "KV events: no name for namespace %.60r, which is left out: %s", namespace, said
                )
            return None

    def _stored(self, group: Group, tier: Tier, pages: Pages, names: Names) -> BlockStored:
        parent = pages.parent
        lora = () if names.lora_name is None else (names.lora_name,)
        keys: list[tuple[Any, ...] | None] = [lora or None] * len(pages)
        if names.cache_salt is not None and pages.start == 0:
            keys[0] = (*lora, names.cache_salt)
        size = self._page_size
        for start, end, identity in pages.identities:
            for page in range(max(0, start // size), min(len(pages), -(-end // size))):
                keys[page] = (*(keys[page] or ()), (identity, start - page * size))
        return BlockStored(
            block_hashes=[_name(each) for each in pages.hashes],
            parent_block_hash=None if parent is None else _name(parent),
            token_ids=pages.tokens.tolist(),
            block_size=self._page_size,
            lora_id=None,
            medium=MEDIA[tier],
            lora_name=names.lora_name,
            extra_keys=keys if any(keys) else None,
            group_idx=group.number,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
        )


def _removed(group: Group, tier: Tier, pages: Pages, cause: Cause) -> BlockRemoved:
    hashes = [_name(each) for each in pages.hashes]
    return BlockRemoved(hashes, MEDIA[tier], group.number, cause)


def _name(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[-INT_NBYTES:], "big")
