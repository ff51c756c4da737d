"""The status of a key for an exception of obstore, and its message in one line.

obstore has one exception for most failures. The outcome of a request is in its text: the answer of
the server above the line `Debug source:`, the operating system's error below.
"""

from __future__ import annotations

import re

from kvgraft_storage import Status

__all__ = ["S3Error", "reason_of", "status_of"]

REQUEST = re.compile(r"Error performing ([A-Z]+ \S+) in")
ANSWER = re.compile(r"status code: (\d{3}[^:\n]*)")
CODE = re.compile(r"<Code>(.*?)</Code>")
MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
CAUSE = re.compile(r'message: "(.*?)"|^\s+"(.*?)",?$|source: (\w+),$', re.MULTILINE)

FULL = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"})
"""Error codes of a full store."""

LONGEST = 300


class S3Error(OSError):
    """A request failed for a reason that is not about one key."""


def status_of(error: Exception) -> Status:
    """MISS, FULL, TIMEOUT or DOWN."""
    text = str(error)
    code = CODE.search(text)
    if isinstance(error, FileNotFoundError) and (code is None or code[1] != "NoSuchBucket"):
        return Status.MISS
    if isinstance(error, TimeoutError) or "kind: Timeout" in text:
        return Status.TIMEOUT
    if code is not None and code[1] in FULL:
        return Status.FULL
    return Status.DOWN


def reason_of(error: Exception) -> str:
    """The request and its error: `GET http://…: 403 Forbidden, AccessDenied: …`."""
    said, _, debug = str(error).partition("\n\nDebug source:")
    request, answer = REQUEST.search(said), ANSWER.search(said)
    if request is None:
        told = said
    elif answer is None:
        causes = [next(filter(None, found)) for found in CAUSE.findall(debug) if any(found)]
        told = f"{request[1]}: {', '.join(causes) or said.rpartition(' - ')[2]}"
    else:
        parts = [found[1] for found in (CODE.search(said), MESSAGE.search(said)) if found]
        told = f"{request[1]}: {', '.join([answer[1].strip(), ': '.join(parts)]).strip(', ')}"
    return " ".join(told.split())[:LONGEST]
