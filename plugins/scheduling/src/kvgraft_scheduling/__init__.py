"""The loop of an engine over a cache: all running requests at once, and those that wait.

stepping       one step of all running requests, between two passes of the model
rows           their page tables and lengths, as attention kernels index them
device_tables  the same on a device
lookahead      how far a request goes before a step has more to do than to count its tokens
pending        pages that a running request computes and one that waits would resume from
waiting        the order in which waiting requests are tried
ready          waiting on asyncio for copies
"""

from __future__ import annotations

from kvgraft_scheduling.device_tables import DeviceTables
from kvgraft_scheduling.waiting import WaitingPlace, WaitingQueue

__all__ = ["DeviceTables", "WaitingPlace", "WaitingQueue"]
