"""The cache object transformers' models and `generate` are given: one or several sessions.

    begin     tokens are about to be computed: slots for them
    update    each layer stores and reads (`kvgraft_transformers.layers`)
    end       they are computed: states stored, boundaries shared

`begin` and `end` run from hooks around the model's forward pass, so that every caller of the model,
`generate` included, keeps the books right at every chunk.

Several sessions are padded on the left to the longest, as transformers' masks expect:

    position   0 . . . past        padded past = 7, n_new = 1
    session a  a a a a a a a | a
    session b  - - - b b b b | b    a padding column reads b's first row; the mask hides it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from kvgraft_transformers.errors import SessionError
from kvgraft_transformers.layers import build_layer
from kvgraft_transformers.working import Columns

if TYPE_CHECKING:
    from kvgraft_transformers.memory import ModelMemory
    from kvgraft_transformers.session import Session

__all__ = ["SessionCache"]


class SessionCache(Cache):
    """A transformers cache over the pools of a `ModelMemory`, which makes it.

    Args:
        memory: the pools and the model's layers.
        sessions: admitted sessions whose data has arrived, one per row of the batch.

    Attributes:
        n_new: tokens the running forward pass computes per session; 0 between passes.
    """

    # whose states and pages are written in place, at addresses that change
    is_compileable = False
    is_croppable = False

    def __init__(self, memory: ModelMemory, sessions: Sequence[Session]) -> None:
        self.memory = memory
        self.sessions = tuple(sessions)
        self.n_new = 0
        self._keeps = True
        self._padding: tuple[int, ...] = ()
        self._columns: dict[tuple[str, int | None], Columns] = {}
        self._slots: dict[str, torch.Tensor] = {}
        # not super(): a class the model insists on may stand between (`lightning.accepted_as`)
        Cache.__init__(self, layers=[build_layer(plan, self) for plan in memory.layers])
        self._paged = [layer for layer in self.layers if hasattr(layer, "begin_pages")]
        self._stateful = [layer for layer in self.layers if hasattr(layer, "begin_states")]
        windows = [plan.window for plan in memory.layers if plan.paged is not None]
        bounded = [window for window in windows if window is not None]
        self._window = max(bounded, default=1) if len(bounded) == len(windows) else None

    @property
    def past(self) -> int:
        """Tokens computed, of the longest session."""
        return max(session.computed for session in self.sessions)

    # -- around a forward pass

    def before_cut(self, n_new: int) -> int:
        """Number of the next `n_new` tokens to compute in one pass, so that states are kept.

        All of them where no session has a resume point among them that needs a state.
        """
        return min(session.before_cut(n_new) for session in self.sessions)

    def begin(self, tokens: torch.Tensor) -> None:
        """Make room for tokens the model is about to compute.

        Args:
            tokens: int64 `[n_sessions, n_new]`.

        Raises:
            SessionError: another batch, tokens that are not the session's, or no slots left; of a
                recurrent model some sessions that begin and some that continue; sessions of
                different lengths where the model cannot be padded.
        """
        batch, n_new = tokens.shape
        if batch != len(self.sessions):
            raise SessionError(
                f"a batch of {batch} rows, sessions: {len(self.sessions)}; open one per row"
            )
        beginning = [session.computed == 0 for session in self.sessions]
        if self._stateful and any(beginning) and not all(beginning):
            raise SessionError(
                f"{sum(beginning)} of {batch} sessions begin, the others continue a state; run "
                "them in passes of their own"
            )
        refused = self.memory.self_check.padding
        if refused is not None and len({session.computed for session in self.sessions}) > 1:
            lengths = sorted({session.computed for session in self.sessions})
            raise SessionError(
                f"sessions of {lengths[0]} to {lengths[-1]} tokens in one pass: this model answers "
                f"differently in a padded batch ({refused}); run sessions of equal length together"
            )
        rows = tokens.tolist()
        for session, row in zip(self.sessions, rows):
            session.make_room(row)
        for session, row in zip(self.sessions, rows):
            session.begin_step(row)
        self._columns.clear()
        self._slots.clear()
        self.n_new = n_new
        past = self.past
        padding = tuple(past - session.computed for session in self.sessions)
        if padding != self._padding:
            self.release()
            self._padding = padding
        n_columns = past + n_new - self._first_column(self._window)
        self._keeps = self.memory.working.hold(self, batch * n_columns)
        for layer in self._paged:
            layer.begin_pages()
        for layer in self._stateful:
            layer.begin_states()

    def end(self) -> None:
        """The pass computed its tokens: they are the sessions' from now on."""
        for layer in self._stateful:
            layer.end_states()
        n_new, self.n_new = self.n_new, 0
        for session in self.sessions:
            session.end_step(n_new)
        for layer in self._paged:
            layer.begin_pages()
        if not self._keeps:
            self.release()
        self.memory.cache.poll()  # callers of `generate` do not

    def release(self) -> None:
        """Give the working copies back; a later pass gathers what it reads."""
        for layer in self._paged:
            layer.drop_copies()
        self.memory.working.release(self)

    # -- calls of layers

    def columns(self, component: str, window: int | None) -> Columns:
        """Where a paged component keeps the running pass's tokens and those they attend to."""
        if not self.n_new:
            raise SessionError(
                "this session's model is not running it: its memory is closed, or the session "
                "belongs to another model"
            )
        key = (component, window)
        columns = self._columns.get(key)
        if columns is None:
            columns = self._columns[key] = self._find_columns(component, window)
        return columns

    def _first_column(self, window: int | None) -> int:
        return 0 if window is None else max(0, self.past - window + 1)

    def _find_columns(self, component: str, window: int | None) -> Columns:
        past, first, n_new = self.past, self._first_column(window), self.n_new
        # read after `poll`, where slots may move, and for this pass alone
        tables = [self.memory.cache.table(each.request, component) for each in self.sessions]
        found: dict[int, torch.Tensor] = {}

        def read(at: int) -> torch.Tensor:
            """Layers that hold the same columns read the same ones."""
            if at not in found:
                found[at] = self._rows(tables, at, past)
            return found[at]

        end = past + n_new
        write = self._rows(tables, past, end).flatten()
        return Columns(first, past, end, write, read)

    def _rows(self, tables: Sequence[npt.NDArray[np.int32]], first: int, end: int) -> torch.Tensor:
        """Rows of columns of the padded batch, int64 `[batch, end - first]`.

        Args:
            tables: slots of each session's pages.
            first: the first column.
            end: behind the last one.
        """
        page_size, rows = self.memory.page_size, []
        for table, padding in zip(tables, self._padding):
            # column j of the padded batch is position j - padding of this session
            positions = np.arange(first - padding, end - padding)
            if first < padding:
                positions = positions.clip(min=0)
            pages, offsets = np.divmod(positions, page_size)
            rows.append(table[pages] * np.int64(page_size) + offsets)
        found = rows[0][None] if len(rows) == 1 else np.stack(rows)
        return torch.from_numpy(found).to(self.memory.device)

    def host_rows(self, component: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Host page and offset of the new tokens, int64 `[batch * n_new]` each."""
        page_size = self.memory.page_size
        pages, offsets = [], []
        for session in self.sessions:
            table = self.memory.cache.host_table(session.request, component).astype(np.int64)
            positions = np.arange(session.computed, session.computed + self.n_new)
            pages.append(table[positions // page_size])
            offsets.append(positions % page_size)
        return torch.from_numpy(np.concatenate(pages)), torch.from_numpy(np.concatenate(offsets))

    def _state_slots(self, component: str) -> torch.Tensor:
        slots = self._slots.get(component)
        if slots is None:
            read = self.memory.cache.state_slot
            numbers = [read(session.request, component) for session in self.sessions]
            slots = self._slots[component] = torch.tensor(numbers, device=self.memory.device)
        return slots

    def read_states(self, component: str, plane: torch.Tensor) -> torch.Tensor:
        """The sessions' states in one plane, `[batch, *shape]`; a view for a single session."""
        slots = self._state_slots(component)
        if len(self.sessions) == 1:
            slot = int(slots[0])
            return plane[slot : slot + 1]
        return plane.index_select(0, slots)

    def write_states(
        self, component: str, plane: torch.Tensor, states: torch.Tensor | None
    ) -> None:
        """Bring states `[batch, *shape]` into the plane, unless they are views of it."""
        assert states is not None
        slots = self._state_slots(component)
        if len(self.sessions) > 1 or states.data_ptr() != plane[int(slots[0])].data_ptr():
            plane.index_copy_(0, slots, states)

    # -- calls of transformers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens computed, and those of the running pass once the layer has stored them."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        length = getattr(layer, "get_seq_length", None)
        return self.past if length is None else int(length())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: beams would share one session's pages."""
        raise SessionError("beam search reorders sequences; open a session per sequence")

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: computed tokens may be shared already."""
        raise SessionError("a session cannot be cropped; abort it and begin another")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: a session is one sequence."""
        raise SessionError("a session is one sequence; open a session per sequence")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: a session is one sequence."""
        raise SessionError("a session is one sequence; open a session per sequence")

    def activate_past_recording(self) -> None:
        """Refused: assisted decoding crops."""
        self.crop(0)

    def reset(self) -> None:
        """Refused: abort the session instead."""
        raise SessionError("a session cannot be reset; abort it and begin another")

    def __repr__(self) -> str:
        return f"SessionCache({len(self.sessions)} sessions, {self.past} tokens)"

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionCache:
        raise SessionError("a session cannot be copied; begin another with the same tokens")
