"""A torch device: CUDA, ROCm, XPU, and any other with torch's streams and events.

protocol       streams and events, as copies need them
runtime        the device: memory, streams, events
streams        the engine: rings, streams, and the order of it all
routes         which planes go through a ring, and which straight
ways           which call moves which pieces, by their sizes
plain          the way that every device has: torch's own copies
tables         addresses on the device, as a kernel takes them
kernels        a kernel that copies by addresses; needs Triton
page_locked    memory of the host that CUDA page-locks where it is

`docs/accelerators.md` says which tests show what.
"""

from __future__ import annotations

from kvgraft_accelerator.runtime import Accelerator

__all__ = ["Accelerator"]
