"""Moving data between tiers without blocking the scheduler.

engine      the interface; cpu, streams, no_payload and stepped implement it
journal     reserved, submitted, acknowledged, committed or aborted
"""

from __future__ import annotations

from kvgraft.pools.copies import PlaneCopy, pair_planes
from kvgraft.transfers.cpu import CpuTransferEngine
from kvgraft.transfers.engine import Fence, Ticket, TransferEngine
from kvgraft.transfers.journal import Journal, Transfer
from kvgraft.transfers.no_payload import NoPayloadTransferEngine
from kvgraft.transfers.stepped import SteppedTransferEngine

__all__ = [
    "CpuTransferEngine",
    "Fence",
    "Journal",
    "NoPayloadTransferEngine",
    "PlaneCopy",
    "SteppedTransferEngine",
    "Ticket",
    "Transfer",
    "TransferEngine",
    "pair_planes",
]
