"""The backend `s3`: one object per key in a bucket of any S3-compatible store.

options, location   parts of a URL: options, bucket and prefix, names of objects
store               the backend, made of
client, failure     requests, many at a time; the meaning of the library's errors
"""

from __future__ import annotations

from kvgraft_s3.options import S3Options
from kvgraft_s3.store import S3Backend
from kvgraft_storage import StorageDriver

__all__ = ["DRIVER", "S3Backend", "S3Options"]

DRIVER = StorageDriver(
    api="1.0",
    summary="objects in a bucket of an S3-compatible store, shared by machines",
    options=S3Options,
    open=S3Backend.open,
)
"""The driver behind the entry point `s3`."""
