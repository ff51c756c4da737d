"""Client of the master's HTTP service, for names of stored values and for the capacity."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence

from kvgraft_mooncake.codes import MooncakeError

__all__ = ["Admin"]

PORT = 9003

AT_ONCE = 50
"""Most names in a request; more make its line too long."""


class Admin:
    """The service of one master.

    Args:
        url: its address; port 9003 of the master by default.
        timeout_s: longest wait for the next bytes of an answer.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    def names(self) -> list[str]:
        """Names of all values of the master, of all users, one per line."""
        return list(self._lines("/get_all_keys"))

    def sizes(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Bytes of each replica of the values that are there.

        The client library is not asked, because its query protects values from eviction for some
        seconds.
        """
        found: dict[str, list[int]] = {}
        for first in range(0, len(names), AT_ONCE):
            some = ",".join(names[first : first + AT_ONCE])
            told = json.loads("".join(self._lines(f"/batch_query_keys?keys={some}")))
            for name, each in told["data"].items():
                if each["ok"]:
                    found[name] = [replica["size_"] for replica in each["values"] or ()]
        return found

    def capacity_nbytes(self) -> int:
        """Bytes of all segments of the master."""
        for line in self._lines("/metrics"):
            if line.startswith("master_total_capacity_bytes "):
                return int(float(line.split()[1]))
        raise MooncakeError(f"{self._url}/metrics does not name master_total_capacity_bytes")

    def _lines(self, path: str) -> Iterator[str]:
        try:
            with urllib.request.urlopen(self._url + path, timeout=self._timeout_s) as answer:
                for line in answer:
                    yield line.decode().rstrip("\n")
        except (OSError, ValueError) as error:
            raise MooncakeError(
                f"{self._url}{path}: {error}; start the master with --metrics_host and "
                "--metrics_port, and name them with admin=http://HOST:PORT"
            ) from error
