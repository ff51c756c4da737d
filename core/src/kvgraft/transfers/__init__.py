"""Moving data between tiers without blocking the scheduler.

engine      the interface, and the engines of the CPU; streams are a package
journal     reserved, submitted, acknowledged, committed or aborted
"""

from __future__ import annotations

from kvgraft.pools.component import PlaneCopy, pair_planes
from kvgraft.transfers.engine import (
    CpuTransferEngine,
    Fence,
    NoPayloadTransferEngine,
    Ticket,
    TransferEngine,
)
from kvgraft.transfers.journal import Journal, Transfer

__all__ = [
    "CpuTransferEngine",
    "Fence",
    "Journal",
    "NoPayloadTransferEngine",
    "PlaneCopy",
    "Ticket",
    "Transfer",
    "TransferEngine",
    "pair_planes",
]
