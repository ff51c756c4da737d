"""The function that vLLM runs in each of its processes: entry point group `vllm.general_plugins`.

If the manager is off, it imports nothing of vLLM and changes nothing.
"""

from __future__ import annotations

import logging
import os

from kvgraft import ConfigError
from kvgraft_vllm.manager_settings import ManagerSettings

__all__ = ["install"]

logger = logging.getLogger("kvgraft.vllm")


def install() -> None:
    """Replace vLLM's cache manager by kvgraft's if `KVGRAFT_VLLM_MANAGER` says so.

    An unsupported version of vLLM is named in the log and keeps its own manager.

    Raises:
        ConfigError: impossible settings.
    """
    settings = ManagerSettings.from_environment(os.environ)
    if settings is None:
        return
    import vllm

    from kvgraft_vllm.engine import log_as_vllm
    from kvgraft_vllm.interface import MANAGER_INTERFACE

    log_as_vllm()
    try:
        MANAGER_INTERFACE.require_supported(vllm.__version__)
    except ConfigError as error:
        logger.warning("%s; vLLM's own cache manager stays", error)
        return
    from kvgraft_vllm.manager import put_in

    put_in(settings)
