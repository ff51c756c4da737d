"""nano-vllm's block manager over a kvgraft cache: its six calls, for its own scheduler.

    import nanovllm.engine.scheduler as scheduler
    from examples.nano_vllm import BlockManager
    scheduler.BlockManager = BlockManager

nano-vllm owns the tensors. A block is a slot of the cache, and block tables only grow (rule N1).
"""

from __future__ import annotations

from typing import Any

from kvgraft import Cache, Request, TokenKey

RESERVE = 256
"""Decode tokens that a sequence is promised blocks for, so that it is rarely preempted."""


class BlockManager:
    """Decides which blocks a sequence gets, and which stay for later ones.

    Attributes:
        cache: the cache, for its statistics.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = Cache.open(
            ["full"], page_size=block_size, device_tokens=num_blocks * block_size, payload=False
        )
        self._requests: dict[int, Request] = {}

    def can_allocate(self, seq: Any) -> int:
        """The blocks that need not be computed; -1 while there is no room."""
        request = self._requests.get(seq.seq_id)
        if request is None:
            left = seq.max_tokens - seq.num_completion_tokens
            request = self.cache.begin(TokenKey(seq.token_ids), reserve=min(left, RESERVE))
            if not self.cache.admit(request).admitted:
                self.cache.abort(request)
                return -1
            self._requests[seq.seq_id] = request
        return request.anchor_tokens // self.block_size

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        """Give an admitted sequence the blocks of its prompt."""
        request = self._requests[seq.seq_id]
        assert self.cache.allocate(request, len(seq) - request.computed)
        seq.num_cached_tokens = num_cached_blocks * self.block_size
        self._extend_table(seq, request)

    def can_append(self, seq: Any) -> bool:
        """Whether there is a block for the sequence's last token."""
        request = self._requests[seq.seq_id]
        return self.cache.allocate(request, len(seq) - request.computed)

    def may_append(self, seq: Any) -> None:
        """Give the sequence the block that its last token needs, if it needs one."""
        self._extend_table(seq, self._requests[seq.seq_id])

    def hash_blocks(self, seq: Any) -> None:
        """The scheduled tokens are computed: others can resume from them."""
        request, key = self._requests[seq.seq_id], self._requests[seq.seq_id].key
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        key.extend(seq.token_ids[key.n_tokens : end])
        self.cache.computed(request, end - request.computed)
        self.cache.checkpoint(request, keep_slots=True)

    def deallocate(self, seq: Any) -> None:
        """The sequence has ended, or goes on later; its blocks stay until others need them."""
        request = self._requests.pop(seq.seq_id)
        if seq.is_finished:
            self.cache.finish(request)
        else:
            self.cache.retract(request)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def _extend_table(self, seq: Any, request: Request) -> None:
        seq.block_table += self.cache.table(request, "full", len(seq.block_table)).tolist()
