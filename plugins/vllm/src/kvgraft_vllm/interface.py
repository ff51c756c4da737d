"""The versions of vLLM this is written for, and the names and signatures of it that are relied on.

vLLM calls this interface experimental and changes it between minor versions. A version that is not
known is refused when the tier is loaded; another signature is named.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

from kvgraft import ConfigError

__all__ = ["OLDEST", "SIGNATURES", "TOO_NEW", "differences", "require_supported"]

OLDEST, TOO_NEW = (0, 32), (0, 34)
"""The first minor version that works, and the first that is not known to."""

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "SecondaryTierManager.__init__": (
        "self",
        "offloading_spec",
        "primary_kv_view",
        "tier_type",
        "backpressure_detector",
    ),
    "SecondaryTierManager.lookup": ("self", "key", "req_context"),
    "SecondaryTierManager.submit_store": ("self", "job_metadata"),
    "SecondaryTierManager.submit_load": ("self", "job_metadata"),
    "SecondaryTierManager.get_finished_jobs": ("self",),
    "SecondaryTierManager.touch": ("self", "keys", "req_context"),
    "SecondaryTierManager.on_new_request": ("self", "req_context"),
    "SecondaryTierManager.on_request_finished": ("self", "req_context"),
    "SecondaryTierManager.on_schedule_end": ("self", "context"),
    "SecondaryTierManager.take_events": ("self",),
    "SecondaryTierManager.get_stats": ("self",),
    "SecondaryTierManager.build_metric_definitions": ("extra_config",),
    "SecondaryTierManager.drain_jobs": ("self",),
    "SecondaryTierManager.shutdown": ("self",),
    "TransferJob": ("job_id", "keys", "chunk_ids", "is_promotion", "req_context", "submit_time"),
    "JobResult": ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    "RequestOffloadingContext": ("policy",),
    "OffloadingEvent": ("keys", "medium", "removed", "locality", "ownership", "removal_expected"),
    "OffloadingCounterMetadata": ("documentation", "labelnames"),
    "OffloadingGaugeMetadata": ("documentation", "labelnames"),
}
"""Parameters by name; vLLM may have more behind them, with defaults."""


def require_supported(version: str) -> None:
    """Refuse a vLLM that this was not written for.

    Raises:
        ConfigError: it is older or newer, or does not say.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else None
    if minor is None or not OLDEST <= minor < TOO_NEW:
        raise ConfigError(
            f"kvgraft-vllm: vLLM {version} is not >={_text(OLDEST)},<{_text(TOO_NEW)}; "
            f"pip install 'vllm>={_text(OLDEST)},<{_text(TOO_NEW)}', "
            "or another version of kvgraft-vllm"
        )


def differences(found: Mapping[str, object]) -> list[str]:
    """How the classes and functions of these names differ from what is relied on; a line each."""
    lines = []
    for name, expected in SIGNATURES.items():
        owner, _, attribute = name.partition(".")
        thing: object = found.get(owner)
        if attribute and thing is not None:
            thing = getattr(thing, attribute, None)
        if not callable(thing):
            lines.append(f"{name} is not there")
            continue
        parameters = inspect.signature(thing).parameters
        names = tuple(parameters)
        more = [parameters[each] for each in names[len(expected) :]]
        needed = [each.name for each in more if each.default is inspect.Parameter.empty]
        if names[: len(expected)] != expected or needed:
            lines.append(f"{name}({', '.join(names)}) is not ({', '.join(expected)})")
    return lines


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
