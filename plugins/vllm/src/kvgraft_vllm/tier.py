"""The class that vLLM loads: `"type": "KvgraftTier", "module_path": "kvgraft_vllm.tier"`.

It translates vLLM's interface to `StoreTier`, which does the work.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import vllm

from kvgraft import ConfigError
from kvgraft_storage import Status, open_storage
from kvgraft_vllm.counts import COUNTERS, GAUGES
from kvgraft_vllm.engine import describe_engine, log_as_vllm
from kvgraft_vllm.interface import INTERFACE
from kvgraft_vllm.settings import TierSettings
from kvgraft_vllm.store_tier import StoreTier

INTERFACE.require_supported(
    vllm.__version__
)  # before the imports that another version may not have

from vllm.config import VllmConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # noqa: E402
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload import base as offload  # noqa: E402
from vllm.v1.kv_offload.tiering import base as tiering  # noqa: E402

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["KvgraftTier"]

logger = logging.getLogger("kvgraft.vllm")


class KvgraftTier(tiering.SecondaryTierManager):
    """A kvgraft store below vLLM's CPU memory."""

    medium: ClassVar[offload.Medium] = offload.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: offload.OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **given: Any,
    ) -> None:
        changed = INTERFACE.differences({**vars(offload), **vars(tiering)})
        if changed:
            raise ConfigError(
                f"kvgraft-vllm: vLLM {vllm.__version__} has another interface: "
                f"{'; '.join(changed)}; report it, and use another version until then"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.of(given)
        self.locality = None if settings.locality is None else offload.Locality(settings.locality)
        engine = describe_engine(
            offloading_spec.config,
            _engine_config(),
            settings,
            chunk_nbytes=self.block_size_bytes,
            version=vllm.__version__,
        )
        log_as_vllm()
        if settings.enable_kv_events and not (
            offloading_spec.kv_events_config.enable_kv_cache_events
        ):
            logger.warning(
                "kvgraft-vllm: enable_kv_events does nothing while vLLM's own KV events are off; "
                "set --kv-events-config"
            )
            settings = settings.model_copy(update={"enable_kv_events": False})
        self._tier = StoreTier(engine, settings, open_storage(settings.url), primary_kv_view)
        logger.info(
            "kvgraft: %s, fingerprint %s", settings.url, engine.fingerprint.digest.hex()[:16]
        )

    def lookup(
        self, key: offload.OffloadKey, req_context: offload.ReqContext
    ) -> offload.LookupResult:
        end_token = req_context.get_offload_key_position(key)
        status = self._tier.lookup(key, req_context.req_id, end_token)
        if status is None:
            return offload.LookupResult.RETRY
        return offload.LookupResult.HIT if status is Status.OK else offload.LookupResult.MISS

    def submit_store(self, job_metadata: tiering.TransferJob) -> None:
        self._tier.store(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids)

    def submit_load(self, job_metadata: tiering.TransferJob) -> None:
        request = job_metadata.req_context
        self._tier.load(
            job_metadata.job_id,
            job_metadata.keys,
            job_metadata.chunk_ids,
            request.req_id,
            map(request.get_offload_key_position, job_metadata.keys),
        )

    def get_finished_jobs(self) -> Iterable[tiering.JobResult]:
        return [
            tiering.JobResult(
                job_id=finished.job.number,
                success=finished.success,
                successful_keys=None if finished.success else finished.ok_keys,
                transfer_time=finished.seconds,
                transfer_bytes=finished.nbytes,
            )
            for finished in self._tier.take_finished()
        ]

    def touch(self, keys: Collection[offload.OffloadKey], req_context: offload.ReqContext) -> None:
        self._tier.touch(keys)

    def on_new_request(self, req_context: offload.ReqContext) -> offload.RequestOffloadingContext:
        return offload.RequestOffloadingContext()

    def on_request_finished(self, req_context: offload.ReqContext) -> None:
        self._tier.finish_request(req_context.req_id)

    def on_schedule_end(self, context: offload.ScheduleEndContext) -> None:
        self._tier.end_step()

    def take_events(self) -> Iterable[offload.OffloadingEvent]:
        for removed, keys in self._tier.take_events():
            yield offload.OffloadingEvent(
                keys=keys, medium=self.medium, removed=removed, locality=self.locality
            )

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, offload.OffloadingMetricMetadata]:
        counters = {
            name: offload.OffloadingCounterMetadata(each.text, each.labels)
            for name, each in COUNTERS.items()
        }
        gauges = {
            name: offload.OffloadingGaugeMetadata(each.text, each.labels)
            for name, each in GAUGES.items()
        }
        return {**counters, **gauges}

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        taken = self._tier.take_metrics()
        for (name, labels), n in taken.counters.items():
            stats.increase_counter(name, n, labels)
        for (name, labels), value in taken.gauges.items():
            stats.set_gauge(name, value, labels)
        return stats

    def drain_jobs(self) -> None:
        self._tier.drain(self._tier.settings.shutdown_s)

    def shutdown(self) -> None:
        self._tier.close()


def _engine_config() -> VllmConfig | None:
    """The engine's configuration.

    vLLM hands a tier only a part of it; the connector that creates the tier has all of it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig):
            return found
        frame = frame.f_back
    return None
