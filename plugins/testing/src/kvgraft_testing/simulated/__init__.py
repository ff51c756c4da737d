"""A device without hardware that runs everything as late as allowed, and checks the order.

    device = SimulatedDevice()
    ...                             # serve a cache on it
    device.finish()                 # ContractViolation: B4: backup of layer 0 on backup reads ...

device     the runtime: memory, streams, the schedule
tensor     tensors whose bytes only the device can see; torch's operators on them are kernels
streams    queues of work, and events
ordering   happens-before over bytes
"""

from __future__ import annotations

from kvgraft_testing.simulated.device import Choose, SimulatedDevice
from kvgraft_testing.simulated.ordering import Unordered
from kvgraft_testing.simulated.tensor import DeviceTensor

__all__ = ["Choose", "DeviceTensor", "SimulatedDevice", "Unordered"]
