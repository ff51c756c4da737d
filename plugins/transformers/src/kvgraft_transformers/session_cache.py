"""The cache object for transformers' models and `generate`: one or several sessions.

    begin     tokens are about to be computed: slots for them
    update    each layer stores and reads (`kvgraft_transformers.layers`)
    end       they are computed: states stored, boundaries shared

Hooks around the model's forward pass call `begin` and `end`, so that bookkeeping is right for every
caller of the model, `generate` included.

Several sessions are padded on the left to the longest, as transformers' masks expect:

    position   0 . . . past        padded past = 7, n_new = 1
    session a  a a a a a a a | a
    session b  - - - b b b b | b    a padding column reads b's first row; the mask hides it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from kvgraft import KvgraftError
from kvgraft_transformers.errors import SessionError
from kvgraft_transformers.layers import build_layer
from kvgraft_transformers.probing import cache_argument, takes_positions
from kvgraft_transformers.working import Columns, Places

if TYPE_CHECKING:
    from kvgraft import Step
    from kvgraft_transformers.memory import ModelMemory
    from kvgraft_transformers.session import Session

__all__ = ["SessionCache"]


class SessionCache(Cache):
    """A transformers cache over the pools of a `ModelMemory`, which makes it.

    Args:
        memory: the pools and the model's layers.
        sessions: admitted sessions whose data has arrived, one per row of the batch.

    Attributes:
        n_new: tokens per session of the running forward pass; 0 between passes.
        n_drafts: the last ones of them, which `keep` may reject; of some sessions fewer.

    Raises:
        SessionError: one session for two rows.
    """

    # its states and pages are written in place, at addresses that change
    is_compileable = False
    is_croppable = False

    def __init__(self, memory: ModelMemory, sessions: Sequence[Session]) -> None:
        self.memory = memory
        self.sessions = tuple(sessions)
        rows: dict[int, int] = {}
        for row, session in enumerate(self.sessions):
            first = rows.setdefault(id(session), row)
            if first != row:
                raise SessionError(
                    f"rows {first} and {row} of a batch are the same session; open one per row"
                )
        self.n_new = self.n_drafts = 0
        self._drafts: list[int] = []
        self._kept_rows: list[int] | None = None
        self._keeps = True
        # on an accelerator a call costs more than copying pages twice
        self._by_session = memory.device.type == "cpu" or len(self.sessions) == 1
        self._padding: tuple[int, ...] = ()
        self._step: Step | None = None
        self._columns: dict[tuple[str, int | None], Columns] = {}
        self._slots: dict[str, torch.Tensor] = {}
        self._takes_positions = takes_positions(memory.model)
        self._inputs: dict[str, torch.Tensor] = {}
        self._rows: list[list[int]] = []
        # not super(): a class that the model requires may be between (`lightning.accepted_as`)
        Cache.__init__(self, layers=[build_layer(plan, self) for plan in memory.layers])
        self._paged = [layer for layer in self.layers if hasattr(layer, "begin_pages")]
        self._stateful = [layer for layer in self.layers if hasattr(layer, "begin_states")]
        windows = [plan.window for plan in memory.layers if plan.paged is not None]
        bounded = [window for window in windows if window is not None]
        self._window = max(bounded, default=1) if len(bounded) == len(windows) else None

    @property
    def arguments(self) -> dict[str, SessionCache]:
        """The argument for the model and `generate`: this cache under the model's name for it.

        The name is `cache`; before transformers 5.24 `past_key_values`, or `cache_params`.
        """
        return {cache_argument(self.memory.model): self}

    @property
    def past(self) -> int:
        """Computed tokens of the longest session."""
        return max(session.computed for session in self.sessions)

    # -- around a forward pass

    def before_cut(self, n_new: int) -> int:
        """How many of the next `n_new` tokens to compute in one pass, so that states are kept.

        All of them if no session has a resume point among them that needs a state.
        """
        if n_new == 1:
            return 1
        return min(session.before_cut(n_new) for session in self.sessions)

    def inputs(self, n_new: int, drafts: Sequence[Sequence[int]] = ()) -> dict[str, torch.Tensor]:
        """Arguments of the model for a pass over the sessions' next `n_new` tokens.

        They are the sessions' own tokens, so nothing is read back from the device.

        Args:
            n_new: tokens of each session, drafts included.
            drafts: the last of them by session, some or none, which `keep` must be told of once the
                pass has run; by default all are known.
        """
        starts = [session.computed for session in self.sessions]
        self._rows = [
            session.key.tokens(start, start + n_new).tolist()
            for session, start in zip(self.sessions, starts)
        ]
        self._drafts = [len(each) for each in drafts]
        for row, more in zip(self._rows, drafts):
            row.extend(more)
        made = {"input_ids": torch.tensor(self._rows)}
        if self._takes_positions:
            made["position_ids"] = torch.tensor(starts)[:, None] + torch.arange(n_new)
        if min(starts) < self.past:
            padding = self.past - torch.tensor(starts)[:, None]
            made["attention_mask"] = (torch.arange(self.past + n_new) >= padding).long()
        self._inputs = {name: self._to_device(each) for name, each in made.items()}
        return self._inputs

    def made(self, name: str, value: object) -> bool:
        """Whether an argument of the beginning pass comes from `inputs`."""
        return value is not None and self._inputs.get(name) is value

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy without waiting; `values` may change when this returns."""
        return values.to(self.memory.device, non_blocking=True)

    def begin(self, tokens: torch.Tensor) -> None:
        """Make room for the tokens that the model is about to compute.

        Args:
            tokens: int64 `[n_sessions, n_new]`.

        Raises:
            SessionError: another batch, tokens that are not the session's, or no slots left; for a
                recurrent model some sessions begin and some continue; sessions have different
                lengths and the model cannot be padded.
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
        made = self.made("input_ids", tokens)
        rows, drafts = (self._rows, self._drafts) if made else (tokens.tolist(), [])
        drafts = drafts or [0] * batch
        self._inputs = {}  # these are of one pass
        for session, row in zip(self.sessions, rows):
            session.expect_next(row)
        self._step = self._allocate(n_new, max(drafts))
        for session, row, n_drafts in zip(self.sessions, rows, drafts):
            session.begin_step(row[: n_new - n_drafts])
        self._columns.clear()
        self._slots.clear()
        self.n_new, self.n_drafts = n_new, max(drafts)
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

    def _allocate(self, n_new: int, n_drafts: int) -> Step:
        """Slots for the next `n_new` tokens of every session.

        Raises:
            SessionError: there are not enough.
        """
        requests = [session.request for session in self.sessions]
        taken, self.memory.taken = self.memory.taken, None
        if taken is not None and taken[1] == n_new and taken[0].requests == requests:
            step = taken[0]
        elif n_drafts:
            step = self.memory.cache.step(requests, n_drafts=n_new - 1, n_computed=0)
        else:
            step = self.memory.cache.step(requests, n_tokens=n_new, n_computed=0)
        if step.refused:
            raise SessionError(
                f"no slots for {n_new} tokens after {step.refused[0].computed}; begin the session "
                "with a larger max_new_tokens, or give the memory more device_tokens"
            )
        return step

    def end(self) -> None:
        """The pass computed its tokens: add them to the sessions.

        With several sessions, an error of the cache is stored as the `error` of its session. If
        there are drafts among them, nothing counts before `keep`.
        """
        if not self.n_drafts:
            self.keep([self.n_new] * len(self.sessions))

    def keep(self, kept: Sequence[int]) -> None:
        """Count the first tokens of the pass that ran, of each session as many as given (G2).

        A state has all tokens of its pass in it. Where some do not count it stays as it was before
        the pass, and none count yet: the next pass computes those again (G4).

        Args:
            kept: one number per session, at most `n_new`.
        """
        n_new, self.n_new, self.n_drafts = self.n_new, 0, 0
        if self._stateful:
            kept = [n if n == n_new else 0 for n in kept]
            self._kept_rows = [row for row, n in enumerate(kept) if n] if 0 in kept else None
            for layer in self._stateful:
                layer.end_states()
        self._note(self.sessions, kept)
        for session, n in zip(self.sessions, kept):
            if n < n_new and self.memory.sparse is not None:
                with torch.inference_mode():  # as the pass, whose maps it changes
                    session.hot_buffer.truncate(session.computed)
            session.end_step(n)
        for layer in self._paged:
            layer.begin_pages()
        if not self._keeps:
            self.release()
        self.memory.cache.poll()  # callers of `generate` do not do it

    def _note(self, sessions: Sequence[Session], kept: Sequence[int]) -> None:
        """Report computed tokens to the cache; if that raises, session by session."""
        counts = {session: n for session, n in zip(sessions, kept) if n}
        sessions = tuple(counts)
        before = [session.computed for session in sessions]
        try:
            requests = [session.request for session in sessions]
            self.memory.cache.step(requests, n_tokens=0, n_computed=list(counts.values()))
        except KvgraftError as error:
            noted = [each for each, start in zip(sessions, before) if each.computed > start]
            if noted or len(sessions) == 1:
                # it was raised for the last session that was noted
                [*sessions[:1], *noted][-1].error = error
            if len(sessions) > 1:
                for session in sessions:
                    if session not in noted:
                        self._note([session], [counts[session]])

    def release(self) -> None:
        """Release the working copies; a later pass gathers its tokens."""
        for layer in self._paged:
            layer.drop_copies()
        self.memory.working.release(self)

    # -- called by layers

    def columns(self, component: str, window: int | None) -> Columns:
        """The columns of a paged component in the running pass: new tokens and those they see."""
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
        past, first, n_new, step = self.past, self._first_column(window), self.n_new, self._step
        assert step is not None
        found: dict[int, list[Places] | torch.Tensor] = {}

        def read(at: int) -> list[Places] | torch.Tensor:
            """Layers with the same columns share them."""
            if at not in found:
                places = self._places if self._by_session else self._token_rows
                found[at] = places(component, step.rows, at, past)
            return found[at]

        write = self._to_device(step.slot_mapping[component])
        return Columns(first, past, past + n_new, write, read)

    def _places(self, component: str, rows: torch.Tensor, first: int, past: int) -> list[Places]:
        """The places of computed columns of the padded batch, by session.

        Args:
            component: the component with the planes.
            rows: the sessions' rows of its page table.
            first: the first column.
            past: behind the last one.
        """
        size = self.memory.page_size
        table = self.memory.cache.table_rows(component).numpy()
        found: list[Places] = []
        for row, padding in zip(rows.tolist(), self._padding):
            pages = table[row].astype(np.int64)
            rows_of = partial(self._rows_of, pages)
            # column j of the padded batch is position j - padding of a session
            start, end = first - padding, past - padding
            whole = -(-max(0, start) // size)
            behind = max(whole, end // size)
            if whole == behind:
                whole = behind = -(-end // size)
            found.append(
                Places(
                    self._to_device(rows_of(np.arange(start, min(whole * size, end)))),
                    self._to_device(torch.from_numpy(pages[whole:behind])),
                    self._to_device(rows_of(np.arange(behind * size, end))),
                )
            )
        return found

    def _token_rows(
        self, component: str, rows: torch.Tensor, first: int, past: int
    ) -> torch.Tensor:
        """The same places as rows of tokens, int64 `[batch, n]`."""
        table = self.memory.cache.table_rows(component).numpy()
        positions = np.arange(first, past) - np.array(self._padding)[:, None]
        return self._to_device(self._rows_of(table[rows.numpy()].astype(np.int64), positions))

    def _rows_of(
        self, pages: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Rows of tokens, from pages by sequence; padding before a sequence reads its first row."""
        size, positions = self.memory.page_size, positions.clip(min=0)
        found = np.take_along_axis(pages, positions // size, axis=-1) * size + positions % size
        return torch.from_numpy(found)

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
            assert self._step is not None
            slots = self._to_device(self._step.state_slots[component])
            self._slots[component] = slots
        return slots

    def _own_state(self, component: str, plane: torch.Tensor) -> torch.Tensor:
        """A view of a single session's state, `[1, *shape]`."""
        assert self._step is not None
        slot = self._step.state_slots[component].tolist()[0]  # on the host
        return plane[slot : slot + 1]

    def read_states(self, component: str, plane: torch.Tensor) -> torch.Tensor:
        """The sessions' states in one plane, `[batch, *shape]`.

        A view for a single session, unless drafts may have to be taken out again.
        """
        if len(self.sessions) == 1 and not self.n_drafts:
            return self._own_state(component, plane)
        return plane.index_select(0, self._state_slots(component))

    def write_states(
        self, component: str, plane: torch.Tensor, states: torch.Tensor | None
    ) -> None:
        """Copy states `[batch, *shape]` into the plane, unless they are views of it.

        Those of sessions that rejected drafts are dropped.
        """
        assert states is not None
        if self._kept_rows is not None:
            rows = torch.tensor(self._kept_rows, dtype=torch.int64, device=states.device)
            plane.index_copy_(0, self._state_slots(component)[rows], states[rows])
            return
        if len(self.sessions) > 1:
            plane.index_copy_(0, self._state_slots(component), states)
            return
        own = self._own_state(component, plane)
        if states.data_ptr() != own.data_ptr():
            own.copy_(states)

    # -- called by transformers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Computed tokens, plus those of the running pass once the layer has stored them."""
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
