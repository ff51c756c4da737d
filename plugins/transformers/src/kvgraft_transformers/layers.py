"""Cache layers over pools for transformers' models, one per layer of the model.

They subclass transformers' own layers, because models check `isinstance`, and replace their tensors
by rows of kvgraft's pools. New keys and values go directly into pool pages. Attention reads
`[batch, heads, tokens, dim]` from working copies (`kvgraft_transformers.working`), with the values
that transformers' dynamic layers return, so every bit of the result is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvgraft_transformers.architecture import LayerPlan
from kvgraft_transformers.working import WorkingCopy

if TYPE_CHECKING:
    from kvgraft_transformers.session_cache import SessionCache

__all__ = ["CacheLayer", "build_layer"]


class _Attention:
    """Keys and values of one layer, in pages."""

    plan: LayerPlan
    cache: SessionCache
    _updated: bool
    _copies: list[WorkingCopy]

    def _attach_pages(self, plan: LayerPlan, cache: SessionCache) -> None:
        self.plan, self.cache, self._updated = plan, cache, False
        self.is_initialized = True
        self._copies = [WorkingCopy(views) for views in cache.memory.views(plan)]

    def begin_pages(self) -> None:
        """Note that a forward pass begins or has ended."""
        self._updated = False

    def drop_copies(self) -> None:
        """Release the working copies."""
        for copy in self._copies:
            copy.drop()

    def get_seq_length(self) -> int:
        """Past tokens, plus those of the running pass once they are stored."""
        return self.cache.past + (self.cache.n_new if self._updated else 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values; returns all that the new tokens may attend to.

        Args:
            key_states: `[batch, heads, n_new, key_dim]`.
            value_states: `[batch, heads, n_new, value_dim]`.
            args: ignored, as in transformers' dynamic layers.
            kwargs: ignored too.

        Returns:
            Keys and values, `[batch, heads, n_past + n_new, dim]`: views, until the next pass.
        """
        assert self.plan.paged is not None
        columns = self.cache.columns(self.plan.paged, self.plan.window)
        self._updated = True
        keys, values = self._copies[:2]
        return keys.extend(columns, key_states), values.extend(columns, value_states)

    def _index(self, new: torch.Tensor) -> torch.Tensor:
        """Store new indexer keys `[batch, n_new, dim]`; all of them, `[batch, n, dim]`."""
        assert self.plan.indexer is not None
        columns = self.cache.columns(self.plan.indexer, None)
        return self._copies[-1].extend(columns, new.unsqueeze(1)).squeeze(1)


class _Window(_Attention):
    """Keys and values of a window: the mask covers the tokens that `update` returns."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` will return for `query_length` new tokens."""
        assert self.plan.window is not None
        offset = max(self.cache.past - self.plan.window + 1, 0)
        return self.cache.past - offset + query_length, offset


class _State:
    """Convolution and recurrent states of one layer, in one slot per sequence.

    The states of a single sequence are views of the pool, which the model writes in place. States
    of several sequences are gathered, and scattered when the pass ends. So are those of a single
    one with drafts.
    """

    plan: LayerPlan
    cache: SessionCache

    # attributes of transformers' layers
    conv_states: dict[int, torch.Tensor | None]
    recurrent_states: dict[int, torch.Tensor | None]
    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]
    has_previous_state: dict[int, bool]
    conv_kernel_size: dict[int, int | None]

    def _attach_states(self, plan: LayerPlan, cache: SessionCache) -> None:
        self.plan, self.cache = plan, cache
        self.device = cache.memory.device
        assert plan.state is not None
        find = cache.memory.plane
        convs = ["conv"] if plan.n_convs == 1 else [f"conv{i}" for i in range(plan.n_convs)]
        self._convs = [find(plan.state, plan.index, name) for name in convs]
        self._recurrent = find(plan.state, plan.index, "recurrent") if plan.has_recurrent else None
        for position, plane in enumerate(self._convs):
            self.conv_kernel_size[position] = plane.shape[-1]
            self.is_conv_states_initialized[position] = True
        if self._recurrent is not None:
            self.is_recurrent_states_initialized[0] = True
        self.begin_states()

    def begin_states(self) -> None:
        """A forward pass begins: set the states that it continues from."""
        for position in self.has_previous_state:
            self.has_previous_state[position] = self.cache.past > 0
        if not self.cache.n_new:
            return
        assert self.plan.state is not None
        for position, plane in enumerate(self._convs):
            self.conv_states[position] = self.cache.read_states(self.plan.state, plane)
        if self._recurrent is not None:
            self.recurrent_states[0] = self.cache.read_states(self.plan.state, self._recurrent)

    def end_states(self) -> None:
        """The pass has ended: copy its states into the pool, unless they are views of it."""
        assert self.plan.state is not None
        for position, plane in enumerate(self._convs):
            self.cache.write_states(self.plan.state, plane, self.conv_states[position])
            self.conv_states[position] = None
        if self._recurrent is not None:
            self.cache.write_states(self.plan.state, self._recurrent, self.recurrent_states[0])
            self.recurrent_states[0] = None


class PagedLayer(_Attention, DynamicLayer):
    """Full attention."""

    def __init__(self, plan: LayerPlan, cache: SessionCache) -> None:
        DynamicLayer.__init__(self)
        self._attach_pages(plan, cache)


class WindowLayer(_Window, DynamicSlidingWindowLayer):
    """Sliding-window and chunked attention, which differ in their mask."""

    def __init__(self, plan: LayerPlan, cache: SessionCache) -> None:
        assert plan.window is not None
        DynamicSlidingWindowLayer.__init__(self, sliding_window=plan.window)
        self._attach_pages(plan, cache)


class IndexedLayer(_Attention, DynamicIndexedLayer):
    """Sparse attention with all keys and values on the device."""

    def __init__(self, plan: LayerPlan, cache: SessionCache) -> None:
        DynamicIndexedLayer.__init__(self)
        self._attach_pages(plan, cache)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store new indexer keys `[batch, n_new, dim]`; all of them, `[batch, n, dim]`."""
        return self._index(indexer_key_states)


class SparseLayer(_Attention, DynamicIndexedLayer):
    """Sparse attention with keys and values on the host: see `kvgraft_transformers.sparse`."""

    def __init__(self, plan: LayerPlan, cache: SessionCache) -> None:
        DynamicIndexedLayer.__init__(self)
        self._attach_pages(plan, cache)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values on the host first (H1); returns only the new ones.

        Attention fetches the rows that the indexer selects, in `kvgraft_transformers.sparse`.
        """
        self._updated = True
        for row, session in enumerate(self.cache.sessions):
            if self.plan.latent:
                rows = [torch.cat([key_states[row, 0], value_states[row, 0]], dim=-1)]
            else:
                rows = [each[row].transpose(0, 1) for each in (key_states, value_states)]
            session.hot_buffer.append(self.plan.index, session.computed, rows)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store new indexer keys `[batch, n_new, dim]` on both tiers; returns all of them."""
        plan = self.plan
        assert plan.indexer is not None
        pages, offsets = self.cache.host_rows(plan.indexer)
        host = self.cache.memory.host_plane(plan.indexer, plan.index, "index")
        host[pages, offsets] = indexer_key_states.flatten(0, 1).to(host.device)
        return self._index(indexer_key_states)


class StateLayer(_State, LinearAttentionLayer):
    """A recurrence or a short convolution."""

    def __init__(self, plan: LayerPlan, cache: SessionCache) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=max(1, plan.n_convs))
        self._attach_states(plan, cache)


class PagedStateLayer(_State, _Attention, LinearAttentionAndFullAttentionLayer):
    """A recurrence beside full attention, in one layer."""

    def __init__(self, plan: LayerPlan, cache: SessionCache) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=max(1, plan.n_convs))
        self._attach_pages(plan, cache)
        self._attach_states(plan, cache)


class WindowStateLayer(_State, _Window, LinearAttentionAndSlidingWindowAttentionLayer):
    """A recurrence beside a sliding window, in one layer."""

    def __init__(self, plan: LayerPlan, cache: SessionCache) -> None:
        assert plan.window is not None
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(
            self, sliding_window=plan.window, number_of_states=max(1, plan.n_convs)
        )
        self._attach_pages(plan, cache)
        self._attach_states(plan, cache)


CacheLayer: TypeAlias = (
    PagedLayer
    | WindowLayer
    | IndexedLayer
    | SparseLayer
    | StateLayer
    | PagedStateLayer
    | WindowStateLayer
)


def build_layer(plan: LayerPlan, cache: SessionCache) -> CacheLayer | Any:
    """The cache layer of a plan; transformers' own `DummyLayer` for a layer that keeps nothing."""
    if plan.state is not None:
        if plan.paged is None:
            return StateLayer(plan, cache)
        bounded = plan.window is not None
        return (WindowStateLayer if bounded else PagedStateLayer)(plan, cache)
    if plan.paged is None:
        return DummyLayer()
    if plan.sparse:
        return SparseLayer(plan, cache)
    if plan.indexer is not None:
        return IndexedLayer(plan, cache)
    return (PagedLayer if plan.window is None else WindowLayer)(plan, cache)
