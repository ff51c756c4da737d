"""Requests go from one cache to another, in another process (D5).

    from kvgraft_nixl import HandOver, NixlTransport

    handed = HandOver(cache, NixlTransport(), model="llama", weights="rev-1")

handover     the calls of an engine
sending      a cache's offers to others, and their pins
receiving    requests that come from others; arrival is one of them
memory       the pools as addresses, and the part of them that a boundary needs
messages     both sides' messages
transport    the interface that moves bytes; engine is NIXL behind it
"""

from __future__ import annotations

from kvgraft_nixl.arrival import Arrival, Stage
from kvgraft_nixl.engine import NixlTransport
from kvgraft_nixl.handover import HandOver
from kvgraft_nixl.messages import Offer
from kvgraft_nixl.receiving import ReceivingStats
from kvgraft_nixl.sending import SendingStats
from kvgraft_nixl.transport import Message, Pieces, Read, ReadState, Region, Transport

__version__ = "0.1.0"

__all__ = [
    "Arrival",
    "HandOver",
    "Message",
    "NixlTransport",
    "Offer",
    "Pieces",
    "Read",
    "ReadState",
    "ReceivingStats",
    "Region",
    "SendingStats",
    "Stage",
    "Transport",
]
