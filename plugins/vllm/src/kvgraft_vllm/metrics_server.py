"""Serves kvgraft's metrics on a port of its own, beside vLLM's, from the scheduler's process."""

from __future__ import annotations

from kvgraft import Cache, ConfigError
from kvgraft_vllm.manager_settings import VARIABLE

__all__ = ["serve_metrics"]


def serve_metrics(cache: Cache, port: int) -> None:
    """Serve a cache's metrics for Prometheus at `/metrics` until the process ends.

    Raises:
        ConfigError: `kvgraft-observe` is missing, or the port is in use.
    """
    said = f'{VARIABLE}: "metrics_port" {port}'
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from kvgraft_observe.prometheus import CacheCollector
    except ImportError as error:
        needed = "pip install 'kvgraft-observe[prometheus]'"
        raise ConfigError(f"{said} needs kvgraft-observe ({error}); {needed}") from error
    registry = CollectorRegistry()
    try:
        start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{said}: {why}; give another") from error
    registry.register(CacheCollector(cache))
