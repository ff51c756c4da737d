"""The hot buffer of one running request: its selected tokens on the device, the rest on the host.

The host copy is canonical (H1). In every layer the buffer is a cache of token rows with its own
token-to-row map, because every layer selects different tokens. Nothing here loops over tokens: a
selection is one gather through the map, and one batched copy per plane for missing rows.

    sequence   0 1 2 3 ... n-1      host slots   [page 0][page 1]...
                                    hot rows     row = slot of the request * page_size + offset

While a sequence has fitted the buffer so far, token t sits in the request's row t and nothing is
ever evicted (H6); behind that, the least recently selected row makes room, its lowest number first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvgraft import BudgetError, ConfigError, ContractViolation, IntegrityError
from kvgraft.pools import SLOT_BYTES, slot_index
from kvgraft_hisparse.hot_pool import COMPONENT, HotPool, hot_rows
from kvgraft_hisparse.row_map import RowMap

__all__ = ["HotBuffer", "SwapStatistics"]


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Rows over all layers since the buffer was opened; one row is one token in one layer.

    Attributes:
        rows_hit: distinct selected rows that were resident, summed over `swap_in` calls.
        rows_moved: rows copied from the host to the device.
    """

    rows_hit: int
    rows_moved: int


class HotBuffer:
    """Hot rows of one request, in every layer.

    It owns nothing. The cache takes the hot slots for the request at admission and takes them back
    when it is finished, aborted, retracted or restarted (H8). The host slots are pinned until the
    request ends (H4). `close` the buffer before either is released: other requests may get the
    slots then. `SparseComponent.open_buffer` opens one for a request.

    Args:
        pool: hot rows shared by all requests, and their host planes.
        slots: the request's hot slots, int32 `[n_rows / page_size]` as bytes.
        hot_tokens: tokens that can be selected at once per layer, besides the newest.

    Attributes:
        n_rows: rows per layer, `hot_rows(hot_tokens, page_size)`.

    Raises:
        BudgetError: fewer or more slots than the rows take.

    Cost: besides its rows, 4 bytes per token and layer on the device for the maps. One thread, the
    one that enqueues the layer's work; copies are ordered on the current stream.
    Contract: H1 H2 H3 H4 H5 H6 H7 H8.
    """

    def __init__(self, pool: HotPool, slots: bytes, hot_tokens: int) -> None:
        self.n_rows = hot_rows(hot_tokens, pool.page_size)
        given, needed = len(slots) // SLOT_BYTES, self.n_rows // pool.page_size
        if given != needed:
            raise BudgetError(
                f"component 'hisparse': hot buffer: {given} slots given, {self.n_rows} hot rows "
                f"take {needed}; give the slots of one admitted request, and the hot_tokens it was "
                "admitted with"
            )
        self._pool = pool
        self._open = True
        self._pool_rows = _pool_rows(slots, pool)
        self._host_slots = torch.empty(0, dtype=torch.int64)
        self._maps = {layer: RowMap(self.n_rows, pool.torch_device) for layer in pool.layers}
        self._rows_touched = torch.zeros((), dtype=torch.int64, device=pool.torch_device)
        self._rows_moved = 0

    @property
    def host_slots(self) -> bytes:
        """Host slots of the sequence, int32 `[n_pages]` as bytes, in page order."""
        return self._host_slots.to(torch.int32).numpy().tobytes()

    @property
    def n_host_pages(self) -> int:
        """Host pages of the sequence, including those for future tokens."""
        return len(self._host_slots)

    @property
    def statistics(self) -> SwapStatistics:
        """Rows that selections have hit and moved so far; waits for the device."""
        return SwapStatistics(int(self._rows_touched) - self._rows_moved, self._rows_moved)

    def n_tokens(self, layer: int) -> int:
        """Tokens of the sequence so far, in this layer."""
        return self._map(layer).n_tokens

    def resident_tokens(self, layer: int) -> torch.Tensor:
        """Positions with a hot row in this layer, int64 `[n_resident]`, in row order."""
        tokens = self._map(layer).token_at[:-1]
        return tokens[tokens >= 0]

    def adopt_prefix(self, host_slots: bytes, n_tokens: int | None = None) -> None:
        """Start from a prefix whose rows are on the host; moves no row (H5).

        Its rows are copied to the device when they are first selected.

        Args:
            host_slots: int32 `[n_pages]` as bytes, from position 0; empty is a miss. Pages beyond
                the prefix are for future tokens.
            n_tokens: length of the prefix; whole pages by default.

        Raises:
            BudgetError: fewer pages than the prefix needs; nothing is adopted.
            ContractViolation: the sequence has tokens or pages already, or the buffer is closed.
        """
        self._require_open("adopt_prefix")
        n_pages = len(self._host_slots)
        if n_pages or any(row_map.n_tokens for row_map in self._maps.values()):
            raise ContractViolation(
                "H5", COMPONENT, f"adopt_prefix on a sequence of {n_pages} pages; open a new buffer"
            )
        given = len(host_slots) // SLOT_BYTES
        length = given * self._pool.page_size if n_tokens is None else n_tokens
        if length > given * self._pool.page_size:
            raise BudgetError(
                f"component 'hisparse': a prefix of {length} tokens needs "
                f"{-(-length // self._pool.page_size)} host pages, {given} given; give its whole "
                "host table"
            )
        self.add_host_pages(host_slots)
        for row_map in self._maps.values():
            row_map.extend(length)

    def add_host_pages(self, host_slots: bytes) -> None:
        """Append host slots for future tokens: int32 `[n_pages]` as bytes. Contract: H1 H4."""
        self._require_open("add_host_pages")
        self._host_slots = torch.cat([self._host_slots, slot_index(host_slots)])

    def replace_host_pages(self, first_page: int, host_slots: bytes) -> None:
        """Read pages from other slots holding the same bytes, once a checkpoint shares them (I1).

        Args:
            first_page: the first page to replace.
            host_slots: int32 `[n_pages]` as bytes, pinned for the request from now on (H4).

        Raises:
            ContractViolation: pages beyond the sequence's.
        """
        self._require_open("replace_host_pages")
        end = first_page + len(host_slots) // SLOT_BYTES
        if first_page < 0 or end > len(self._host_slots):
            pages = f"pages {first_page}..{end} of a sequence of {len(self._host_slots)} pages"
            raise ContractViolation("H4", COMPONENT, f"replace_host_pages: {pages}")
        self._host_slots[first_page:end] = slot_index(host_slots)

    def append(self, layer: int, position: int, rows: Sequence[torch.Tensor]) -> None:
        """Add the rows of new tokens: to the host first, then to hot rows (H1).

        The last of them becomes the newest token, whose row no selection evicts (H2). If there are
        more tokens than rows, the last ones become resident. On return the host holds all of them.

        Args:
            layer: model layer.
            position: position of the first of them; the layer's `n_tokens`.
            rows: one tensor `[n_new, *row_shape]` per plane of the layer, in the pool's order.

        Raises:
            BudgetError: fewer host pages than the sequence needs; nothing is written.
            ConfigError: rows of another shape or dtype than the planes.
            ContractViolation: a position that is not the next one, or a closed buffer.
        """
        self._require_open("append")
        row_map, pairs = self._map(layer), self._pool.layers[layer]
        n_new = self._pool.check_rows(layer, rows)
        if position != row_map.n_tokens:
            raise ContractViolation(
                "H1",
                COMPONENT,
                f"layer {layer}: append at position {position} of a sequence of "
                f"{row_map.n_tokens} tokens; append the next token",
            )
        end = position + n_new
        pages = -(-end // self._pool.page_size)
        if pages > len(self._host_slots):
            raise BudgetError(
                f"component 'hisparse': layer {layer}: {end} tokens need {pages} host pages, the "
                f"sequence has {len(self._host_slots)}; call add_host_pages first"
            )
        slots, offsets = self._host_index(torch.arange(position, end))
        for pair, new in zip(pairs, rows, strict=True):
            pair.host[slots, offsets] = new.to(pair.host.device)

        row_map.extend(end)
        kept = min(n_new, self.n_rows)
        tokens = torch.arange(end - kept, end, device=self._pool.torch_device)
        targets = row_map.free_rows(tokens, keep=tokens[:0])
        for pair, new in zip(pairs, rows, strict=True):
            pair.hot[self._pool_rows[targets]] = new[n_new - kept :].to(pair.hot.device)
        row_map.place(tokens, targets)
        row_map.touch(targets)

    def truncate(self, n_tokens: int) -> None:
        """Take the tokens from position `n_tokens` on back, in every layer: rejected drafts.

        Their hot rows are empty again, and the next tokens write over their host rows.

        Raises:
            ContractViolation: a closed buffer.
        """
        self._require_open("truncate")
        for row_map in self._maps.values():
            if row_map.n_tokens > n_tokens:
                row_map.truncate(n_tokens)

    def swap_in(self, layer: int, topk: torch.Tensor) -> torch.Tensor:
        """Make the selected tokens resident; returns their rows (H3).

        Misses replace the least recently selected rows outside this selection, never the newest
        token's (H2). Without a miss there is no copy, and the map does not change (H6).

        Args:
            layer: model layer.
            topk: positions, integer `[n_queries, k]` on the pool's device; negative is padding,
                duplicates are allowed.

        Returns:
            Rows of the pool's flattened planes, int32 `[n_queries, k]`; -1 where padding. They
            hold until the layer's next `swap_in` or `append`.

        Raises:
            BudgetError: more distinct tokens than rows; nothing is moved.
            ContractViolation: a position outside the sequence (H3), or a closed buffer.

        Cost: a gather over `topk` and a scatter; on a miss also a sort of the selection and of the
        buffer's ages, and one copy per plane. Waits for the device once; on a miss more often.
        """
        self._require_open("swap_in")
        row_map = self._map(layer)
        rows = row_map.rows_of(topk)
        if bool(((rows < 0) & (topk >= 0)).any()):
            self._fetch(layer, row_map, topk)
            rows = row_map.rows_of(topk)
        self._rows_touched += row_map.touch(rows)
        return self._pool_rows[rows.long()].to(torch.int32)

    def close(self) -> None:
        """The request is about to end: every later use is an error. Frees nothing (H8).

        Raises:
            ContractViolation: closed already.
        """
        self._require_open("close")
        self._open = False

    def check_integrity(self) -> None:
        """Compare maps with each other and every hot row with its host row, bit by bit.

        Raises:
            IntegrityError: names the rule, layer and first wrong row. Cost: reads all hot rows.
        """
        for layer, row_map in self._maps.items():
            row_map.check_integrity(layer)
            tokens = self.resident_tokens(layer)
            hot_index = self._pool_rows[row_map.rows_of(tokens).long()]
            slots, offsets = self._host_index(tokens.cpu())
            for plane, pair in enumerate(self._pool.layers[layer]):
                hot, host = pair.hot[hot_index].cpu(), pair.host[slots, offsets]
                equal = _as_bytes(hot) == _as_bytes(host)
                if not bool(equal.all()):
                    wrong = int(tokens[(~equal.all(1)).nonzero()[0, 0]])
                    raise IntegrityError(
                        "H3",
                        COMPONENT,
                        f"layer {layer} plane {plane}: the hot row of token {wrong} differs from "
                        "its host row; something wrote to a row it does not own",
                    )

    def _fetch(self, layer: int, row_map: RowMap, topk: torch.Tensor) -> None:
        wanted = torch.unique(topk[topk >= 0].long())
        last = int(wanted[-1])
        if last >= row_map.n_tokens:
            raise ContractViolation(
                "H3",
                COMPONENT,
                f"layer {layer}: token {last} selected from a sequence of {row_map.n_tokens}; "
                "mask positions the layer has not appended",
            )
        rows, newest = row_map.rows_of(wanted), row_map.newest_row()
        held = int(last != row_map.n_tokens - 1 and int(newest) >= 0)
        if len(wanted) + held > self.n_rows:
            raise BudgetError(
                f"component 'hisparse': layer {layer}: {len(wanted)} selected tokens + {held} "
                f"newest > {self.n_rows} hot rows; raise hot_tokens or select for fewer queries "
                "at once"
            )
        misses = wanted[rows < 0]
        targets = row_map.free_rows(misses, keep=torch.cat([rows, newest]))
        slots, offsets = self._host_index(misses.cpu())
        pool_rows = self._pool_rows[targets]
        for pair in self._pool.layers[layer]:
            pair.hot[pool_rows] = pair.host[slots, offsets].to(pair.hot.device)
        row_map.place(misses, targets)
        self._rows_moved += len(misses)

    def _host_index(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page_size = self._pool.page_size
        pages = torch.div(tokens, page_size, rounding_mode="floor")
        return self._host_slots[pages], tokens - pages * page_size

    def _map(self, layer: int) -> RowMap:
        row_map = self._maps.get(layer)
        if row_map is None:
            known = f"{len(self._maps)} layers, {min(self._maps)}..{max(self._maps)}"
            raise ConfigError(f"component 'hisparse': no layer {layer} in the hot pool of {known}")
        return row_map

    def _require_open(self, verb: str) -> None:
        if not self._open:
            raise ContractViolation(
                "H8",
                COMPONENT,
                f"{verb} on a closed hot buffer of {self.n_rows} rows; its slots belong to others",
            )


def _pool_rows(slots: bytes, pool: HotPool) -> torch.Tensor:
    """Pool row of each of a request's rows, int64 `[n_rows + 1]`; the last one is padding's -1."""
    first = slot_index(slots) * pool.page_size
    rows = (first[:, None] + torch.arange(pool.page_size)).flatten()
    return torch.cat([rows, rows.new_tensor([-1])]).to(pool.torch_device)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    flat = rows.contiguous().flatten(1) if rows.dim() > 1 else rows.contiguous()[:, None]
    return flat.view(torch.uint8)
