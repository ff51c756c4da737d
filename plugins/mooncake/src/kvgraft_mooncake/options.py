"""Options of the Mooncake backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from kvgraft import Nbytes
from kvgraft_storage import StorageOptions

__all__ = ["MooncakeOptions"]


class MooncakeOptions(StorageOptions):
    """A process's part in a store.

    Attributes:
        protocol: transport of payloads.
        devices: RDMA devices, separated by commas; empty for all.
        metadata: how clients find each other: `P2PHANDSHAKE` or a metadata server's URL.
        address: host under which other clients reach this process; by default this machine's
            address on the connection to the master.
        segment: bytes of this process's memory that the store may use, for any writer; their data
            is lost when the process ends. 0 contributes nothing.
        buffer: bytes that the client library reserves for calls that copy; kvgraft makes no such
            calls.
        replicas: number of segments in which each value is stored.
        admin: URL of the master's HTTP service, for `stats` and `verify`; by default port 9003.
        timeout_s: seconds to reach the master when a store is opened, and for an HTTP request.
    """

    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = Field(default="", pattern=r"^[\w.:-]*(,[\w.:-]+)*$")
    metadata: str = Field(default="P2PHANDSHAKE", pattern=r"^(P2PHANDSHAKE|[a-z0-9+]+://\S+)$")
    address: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    segment: Nbytes = Field(default=0, ge=0)
    buffer: Nbytes = Field(default=0, ge=0)
    replicas: int = Field(default=1, ge=1, le=16)
    admin: str | None = Field(default=None, pattern=r"^https?://[^\s/]+$")
    timeout_s: float = Field(default=5.0, gt=0, le=600)

    @model_validator(mode="after")
    def _devices_are_for_rdma(self) -> Self:
        if self.devices and self.protocol != "rdma":
            raise ValueError(
                f"devices {self.devices!r} are for protocol rdma, not {self.protocol}; "
                "write protocol=rdma or leave them out"
            )
        return self
