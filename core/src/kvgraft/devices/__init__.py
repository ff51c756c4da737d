"""Devices that run later what they are told now: one protocol, `runtime`.

runtime      streams, events and memory: all that the rest of kvgraft knows of a device
rows         rows of tensors to copy, the one thing that streams are told here
fragments    the same as arrays of addresses, as drivers and kernels take them
accelerator  torch's streams and events, for GPUs
simulated    a device without hardware that runs everything as late as it may, and checks the order
cuda_driver  CUDA's calls that torch does not offer

The CPU needs none of this: torch allocates its memory, and worker threads copy it.
"""

from __future__ import annotations

from kvgraft.devices.rows import PlaneCopy
from kvgraft.devices.runtime import CopySizes, DeviceRuntime, Event, Purpose, Stream

__all__ = ["CopySizes", "DeviceRuntime", "Event", "PlaneCopy", "Purpose", "Stream"]
