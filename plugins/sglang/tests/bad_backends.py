"""SGLang's own file backend with one more defect each, for the suite for tiers."""

from __future__ import annotations

import threading
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

__all__ = ["Late", "Nameless"]


class Nameless(HiCacheFile):  # type: ignore[misc]
    """Pages of every model and rank have one name."""

    def _get_suffixed_key(self, key: str) -> str:
        return key


class Late(HiCacheFile):  # type: ignore[misc]
    """It reads a page after it has said that it is stored."""

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        threading.Timer(0.1, super().set, (key, value)).start()
        return True
