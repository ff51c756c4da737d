"""A router's part in a process of its own: follows a publisher, and loses messages on purpose.

Usage: python subscriber.py PUBLISHER REPLAY TOPIC READY. Makes the file READY once messages come
in, and prints in the end the blocks that it believes to be there, as JSON. Knows vLLM's messages
only, and nothing of kvgraft.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq

END = b"\xff" * 8
LAST_SALT = "the end"


class Follower:
    """The blocks there are, by medium and cache group."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], set[int]] = {}
        self.next = 0
        self.ended = False

    def apply(self, sequence: int, payload: bytes) -> None:
        """Take a message in; it is the next one."""
        assert sequence == self.next
        self.next += 1
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 3
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        there = self.blocks.setdefault((event["medium"], event["group_idx"]), set())
        hashes = event["block_hashes"]
        if event["type"] == "BlockStored":
            assert len(event["token_ids"]) == len(hashes) * event["block_size"]
            assert not there & set(hashes)
            there.update(hashes)
            self.ended = self.ended or [LAST_SALT] in (event.get("extra_keys") or [])
        else:
            assert event["type"] == "BlockRemoved"
            assert there >= set(hashes)
            there.difference_update(hashes)


def replay(socket: zmq.Socket[bytes], follower: Follower) -> int:
    """Ask for all that it misses; how many messages came."""
    socket.send_multipart((b"", follower.next.to_bytes(8, "big")))
    before = follower.next
    while True:
        delimiter, _, sequence, payload = socket.recv_multipart()
        assert delimiter == b""
        if sequence == END:
            return follower.next - before
        follower.apply(int.from_bytes(sequence, "big"), payload)


def main(publisher: str, replays: str, topic: str, ready: str) -> None:
    """Follow until the request that is to be the last."""
    context, follower = zmq.Context(), Follower()
    live, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.connect(publisher)
    live.setsockopt_string(zmq.SUBSCRIBE, topic)
    asking.connect(replays)
    n_live = n_replayed = 0
    while not follower.ended:
        got, number, payload = live.recv_multipart()
        assert got == topic.encode()
        sequence = int.from_bytes(number, "big")
        if sequence % 3 == 1 and LAST_SALT.encode() not in payload:
            continue
        if sequence > follower.next:
            n_replayed += replay(asking, follower)
        if sequence == follower.next:
            follower.apply(sequence, payload)
            n_live += 1
        if n_live == 1:
            Path(ready).touch()
    found = [[*pool, sorted(hashes)] for pool, hashes in sorted(follower.blocks.items()) if hashes]
    json.dump({"blocks": found, "live": n_live, "replayed": n_replayed}, sys.stdout)
    context.destroy(linger=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
