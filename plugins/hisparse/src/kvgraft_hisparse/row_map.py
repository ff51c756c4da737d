"""The map of tokens to hot rows, of one request in one layer, without the data.

Tables are tensors on the device of the hot rows, so that a selection is one gather.
"""

from __future__ import annotations

import torch

from kvgraft import IntegrityError
from kvgraft_hisparse.hot_pool import COMPONENT

__all__ = ["RowMap"]

NEVER = torch.iinfo(torch.int64).max
"""An age that no clock reaches: this row is never a victim."""


class RowMap:
    """The map of tokens to rows of one layer, and each row's last selection.

    Every table has one extra entry at its end, and so at index -1: padding reads it, and evicting
    an empty row writes it. It is always -1, so neither needs a branch.

    Attributes:
        n_tokens: length of the sequence in this layer.
        row_of: token to row, int32 `[capacity + 1]`; -1 where not resident.
        token_at: row to token, int64 `[n_rows + 1]`; -1 where empty.
        last_used: row to clock value, int64 `[n_rows + 1]`; 0 where empty.
        outgrown: whether there were more tokens than rows ever; if not, token t is in row t.
    """

    __slots__ = ("clock", "last_used", "n_rows", "n_tokens", "outgrown", "row_of", "token_at")

    def __init__(self, n_rows: int, device: torch.device) -> None:
        self.n_rows = n_rows
        self.n_tokens = 0
        self.outgrown = False
        self.clock = 0
        self.row_of = torch.full((1,), -1, dtype=torch.int32, device=device)
        self.token_at = torch.full((n_rows + 1,), -1, dtype=torch.int64, device=device)
        self.last_used = torch.zeros(n_rows + 1, dtype=torch.int64, device=device)

    def extend(self, n_tokens: int) -> None:
        """Lengthen the sequence to `n_tokens`; none of the new tokens is resident yet."""
        self.n_tokens = n_tokens
        self.outgrown |= n_tokens > self.n_rows
        capacity = len(self.row_of) - 1
        if n_tokens > capacity:
            grown = self.row_of.new_full((max(n_tokens, capacity + capacity // 2) + 1,), -1)
            grown[:capacity] = self.row_of[:capacity]
            self.row_of = grown

    def truncate(self, n_tokens: int) -> None:
        """Shorten the sequence to `n_tokens`; the rows of the others are empty."""
        self.row_of[n_tokens:] = -1
        rows = (self.token_at >= n_tokens).nonzero()[:, 0]
        self.token_at[rows] = -1
        self.last_used[rows] = 0
        self.n_tokens = n_tokens

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of tokens, int32; -1 for padding and for unknown or absent tokens."""
        return self.row_of[tokens.long().clamp(-1, len(self.row_of) - 1)]

    def newest_row(self) -> torch.Tensor:
        """Row of the newest token, int32 `[1]`; -1 when it is not resident."""
        return self.row_of[self.n_tokens - 1 : self.n_tokens]

    def free_rows(self, tokens: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Empty one row for each token, but none in `keep`; returns the rows, int64 `[n]`.

        At least `n` rows must be outside `keep`.
        """
        if not self.outgrown:
            return tokens
        age = self.last_used.clone()
        age[keep.long()] = NEVER
        age[-1] = NEVER
        rows = torch.sort(age, stable=True).indices[: len(tokens)]
        self.row_of[self.token_at[rows]] = -1
        self.token_at[rows] = -1
        self.last_used[rows] = 0
        return rows

    def place(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Record that `rows`, empty until now, hold `tokens`, whose bytes are there already."""
        self.row_of[tokens] = rows.to(torch.int32)
        self.token_at[rows] = tokens

    def touch(self, rows: torch.Tensor) -> torch.Tensor:
        """Mark rows as just selected; returns how many are distinct, a scalar on the device."""
        self.clock += 1
        self.last_used[rows.long()] = self.clock
        return (self.last_used[:-1] == self.clock).sum()

    def check_integrity(self, layer: int) -> None:
        """Raise `IntegrityError` unless both tables are each other's inverse (H3)."""
        tokens = self.token_at[:-1]
        rows = (tokens >= 0).nonzero()[:, 0]
        mapped, padding = int((self.row_of >= 0).sum()), int(self.token_at[-1])
        problem = None
        if mapped != len(rows) or not bool((self.rows_of(tokens[rows]) == rows).all()):
            problem = (
                f"{mapped} tokens mapped to rows, {len(rows)} rows mapped to tokens, not each "
                "other's inverse"
            )
        elif padding != -1:
            problem = f"padding's row holds token {padding}, not -1"
        elif len(rows) and int(tokens.max()) >= self.n_tokens:
            problem = f"token {int(tokens.max())} resident in a sequence of {self.n_tokens}"
        if problem is not None:
            raise IntegrityError("H3", COMPONENT, f"layer {layer}: {problem}")
