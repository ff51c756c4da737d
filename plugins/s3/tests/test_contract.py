"""The backend keeps the storage contract; where the server is comes from the environment."""

from __future__ import annotations

import pytest

from kvgraft_testing.storage import StorageContract


@pytest.mark.usefixtures("environment")
class TestS3(StorageContract):
    url = "s3:pages{directory}"
