"""Options of the S3 backend, without credentials."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, model_validator
from typing_extensions import Self

from kvgraft_storage import StorageOptions

__all__ = ["S3Options"]


class S3Options(StorageOptions):
    """Endpoint, concurrency and time limits of the store.

    Attributes:
        endpoint: `http://` or `https://` and a host; without it `AWS_ENDPOINT_URL_S3` or
            `AWS_ENDPOINT_URL`, or Amazon's of the region. Requests are encrypted unless it begins
            with `http://`.
        region: the bucket's; without it `AWS_REGION`, or us-east-1.
        connections: most concurrent requests, of all calls together.
        timeout_s: seconds for one request, and for a whole call that has no deadline.
        retries: how often a request is sent again after a 5xx answer or a broken connection, within
            `timeout_s`.
    """

    endpoint: str | None = None
    region: str | None = Field(default=None, min_length=1)
    connections: int = Field(default=16, ge=1, le=256)
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    retries: int = Field(default=1, ge=0, le=10)

    @model_validator(mode="after")
    def _has_an_address(self) -> Self:
        """Checks all fields together, so that the message does not repeat credentials."""
        if self.endpoint is None:
            return self
        parts = urlsplit(self.endpoint)
        if "@" in parts.netloc:
            raise ValueError(
                "endpoint has credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"endpoint {self.endpoint!r} is not http://HOST:PORT or https://HOST")
        if parts.query or parts.fragment:
            raise ValueError(f"endpoint {self.endpoint!r} is more than an address and a path")
        return self
