"""The pools of one model: a kvgraft cache with components for the model's layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvgraft import Cache, ConfigError, Prefetch, Step, TokenKey
from kvgraft.config import CacheConfig, parse_config
from kvgraft.pools import DevicePool, HostMirror
from kvgraft.transfers import TransferEngine
from kvgraft_hisparse.pools import SparseComponent
from kvgraft_storage import StorageSettings
from kvgraft_transformers.architecture import Architecture, LayerPlan, read_architecture
from kvgraft_transformers.attention import without_plans
from kvgraft_transformers.hooks import watch_forward, watch_generate
from kvgraft_transformers.identity import digest_weights, storage_options
from kvgraft_transformers.lightning import accepted_as
from kvgraft_transformers.probing import undisturbed
from kvgraft_transformers.self_check import NOT_CHECKED, SelfCheck, check_reuse
from kvgraft_transformers.session import Session
from kvgraft_transformers.session_cache import SessionCache
from kvgraft_transformers.sparse import route_sparse_attention
from kvgraft_transformers.working import Views, WorkingMemory

__all__ = ["ModelMemory", "check_chunk"]

CUT_TOKENS = 128
"""Fewest tokens between two cuts of a prefill: an extra pass costs about as much as these."""

FETCH_STEP_S = 0.001
"""Pause between two polls of a prefetch."""


class ModelMemory:
    """One model's prefix tree and pools, for all its sessions.

    Args:
        model: a decoder; hooks around its forward pass are installed until `close`.
        architecture: the model's data per layer.
        cache: a cache with the architecture's components.
        self_check: comparisons that were made; none by default.
        working_tokens: see `open`.

    Attributes:
        cache: kvgraft's cache.
        self_check: the comparisons made, and whether batches may be padded.
        layers: plans of the model's layers.
        sparse: name of the component that keeps keys and values on the host; None if none does.
        n_sparse_layers: layers of that component.
        running: the cache of the running forward pass; None between passes.
        taken: the slots that an engine took for the pass it runs next, and for how many tokens of
            each session; None if that takes its own.
        working: bounds the working copies of attention.

    One thread uses it and runs the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        cache: Cache,
        self_check: SelfCheck = NOT_CHECKED,
        working_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.self_check = self_check
        self.architecture = architecture
        self.layers = architecture.layers
        self.cache = cache
        self.device = torch.device(cache.config.device)
        self.page_size = cache.config.page_size
        self.sparse = next((plan.paged for plan in self.layers if plan.sparse), None)
        self.n_sparse_layers = sum(plan.sparse for plan in self.layers)
        self.running: SessionCache | None = None
        self.taken: tuple[Step, int] | None = None
        own = architecture.own_cache
        self._cache_class = SessionCache if own is None else accepted_as(own, SessionCache)
        self._pools: dict[str, DevicePool] = {}
        self._mirrors: dict[str, HostMirror] = {}
        for each in self.cache.mounted:
            self._pools[each.name] = each.component.device
            if each.component.host is not None:
                self._mirrors[each.name] = each.component.host
        if working_tokens is None:
            working_tokens = self._largest_pool_tokens()
        self.working = WorkingMemory(working_tokens)
        self._planes: dict[tuple[str, int, str], torch.Tensor] = {}
        self._views: dict[int, list[Views]] = {}
        self._undo: list[Callable[[], None]] = [watch_forward(self), watch_generate(model)]
        if self.sparse is not None:
            self._undo.append(route_sparse_attention(self))

    @classmethod
    def open(  # noqa: PLR0913 - settings, each given by its name
        cls,
        model: PreTrainedModel,
        *,
        page_size: int = 16,
        chunk_tokens: int = 512,
        sparse_on_host: bool = False,
        probe_tokens: int = 256,
        working_tokens: int | None = None,
        components: Mapping[str, Mapping[str, Any]] | None = None,
        storage: str | Mapping[str, Any] | StorageSettings | None = None,
        transfers: TransferEngine | None = None,
        **settings: Any,
    ) -> ModelMemory:
        """Open pools for a model, with the components that its layers need.

        Args:
            model: a decoder with a language-model head.
            page_size: tokens per page.
            chunk_tokens: a multiple of the page size; recurrent states are kept at its multiples,
                so prefill in such chunks to make prompts reusable there.
            sparse_on_host: keep keys and values of layers with an indexer on the host, and fetch
                selected rows.
            probe_tokens: most tokens of the trial that compares small pools with one pass of the
                plain model: in chunks, behind a reused prefix, in a batch, and padded. 0 for no
                trial.
            working_tokens: most tokens of running batches, padding included, whose keys and values
                are kept a second time in attention's layout; beyond them they are gathered from the
                pools in every pass, which is slower. By default as many as the largest pool holds.
                They take memory beside the pools.
            components: options to add per component or per package, such as
                `{"mamba": {"states": 64}}`.
            storage: a store's URL such as `"file:/var/cache/kvgraft?capacity=10GiB"`, or options
                of `kvgraft_storage.StorageSettings`. `model` and `weights` are computed from the
                model unless given, weights at 10 GB/s. Versions, precision and processor are always
                part of the `salt`, so that different numerics never share.
            transfers: engine for copies between tiers.
            settings: of `kvgraft.CacheConfig`: `device_tokens`, `host_tokens`, `guard` and so on;
                `cut_tokens` is 128 by default, or `chunk_tokens` where these are fewer.

        Raises:
            UnsupportedModelError: the model keeps something that no component serves, or its output
                differs behind a reused prefix; the layer is named if it is known.
            ConfigError: settings cannot work, or the store cannot be opened.
        """
        _expect_model(model)
        check_chunk(chunk_tokens, page_size)
        _check_working(working_tokens)
        extra = _options_by_name(components or {})
        self_check = NOT_CHECKED
        with undisturbed(model), without_plans:
            architecture = read_architecture(model, sparse_on_host=sparse_on_host)
            if probe_tokens:
                self_check = check_reuse(
                    model,
                    architecture,
                    lambda *sizes: _open_trial(model, *sizes),
                    sparse_on_host=sparse_on_host,
                    probe_tokens=probe_tokens,
                )
        options = _component_options(model, architecture, chunk_tokens, extra)
        packages = {name.partition("@")[0] for name in options}
        unknown = sorted(set(extra) - set(options) - packages)
        if unknown:
            raise ConfigError(
                f"components {unknown}: the model has {sorted(options)}; name one of these or its "
                "package"
            )
        plain = {
            "page_size": page_size,
            "device": str(model.device),
            "cut_tokens": min(CUT_TOKENS, chunk_tokens),
            **settings,
        }
        config = _configure(model, {"components": options, **plain}, storage)
        cache = Cache(config, transfers=transfers)
        return cls(model, architecture, cache, self_check, working_tokens)

    def __repr__(self) -> str:
        return f"<ModelMemory of {type(self.model).__name__}: {self.cache!r}>"

    # -- sessions

    def session(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        max_new_tokens: int = 0,
        chunk_tokens: int | None = None,
        resume_at: int | Sequence[int] | None = (),
        namespace: object = None,
    ) -> Session:
        """A session that is ready to run: matched, admitted, its prefix on the device.

        With a storage tier it first prefetches the prompt's stored data, and blocks as long as the
        prefetch policy says: at most `prefetch_timeout_s`, or until all available data has arrived.

        Args:
            input_ids: the prompt, `[n]` or `[1, n]`.
            max_new_tokens: tokens behind it to keep slots for; it cannot become longer.
            chunk_tokens: most tokens of one prefill pass; the whole prompt by default.
            resume_at: tokens of the prompt after which other prompts will differ, such as the end
                of a system prompt: they resume there, rounded down to pages, from the second one
                on. One position, several or None.
            namespace: separates prompts that must not share cache: a tenant's salt, an adapter's
                id. See `kvgraft.TokenKey`.

        Raises:
            AdmissionRefusedError: it does not fit; the message names the pool and the numbers.
            ConfigError: more than one row, no token, a position outside the prompt, or a namespace
                that `TokenKey` refuses.
        """
        tokens = _one_row(input_ids)
        self.check_tokens(tokens)
        key = TokenKey(tokens, namespace=namespace)
        prefetch = self._fetched(key)
        try:
            session = Session(
                self,
                key,
                reserve=max_new_tokens,
                chunk=chunk_tokens,
                prefetch=prefetch,
                resume_at=resume_at,
                limit_tokens=len(tokens) + max_new_tokens,
            )
        except BaseException:
            if prefetch is not None:
                self.cancel(prefetch)
            raise
        session.open()
        return session

    def prefetch(self, key: TokenKey) -> Prefetch | None:
        """Begin to prefetch a prompt's data; returns at once. None without a storage tier.

        Give it to the prompt's `Session`, or `cancel` it.

        Raises:
            ConfigError: a namespace that has no name in storage, such as an object.
        """
        return self.cache.storage.prefetch(key) if self.cache.storage else None

    def cancel(self, prefetch: Prefetch) -> None:
        """Cancel a prefetch whose data is no longer needed."""
        self.cache.storage.cancel(prefetch)

    def _fetched(self, key: TokenKey) -> Prefetch | None:
        """A prefetch that the policy no longer waits for."""
        self.cache.poll()
        prefetch = self.prefetch(key)
        try:
            while prefetch is not None and not prefetch.ready:
                if not self.cache.storage.busy:
                    time.sleep(FETCH_STEP_S)
                self.cache.poll()
        except BaseException:
            if prefetch is not None:
                self.cancel(prefetch)
            raise
        return prefetch

    def session_cache(self, sessions: Sequence[Session]) -> SessionCache:
        """The model's cache for these sessions; `arguments` has it under the model's name.

        Args:
            sessions: admitted ones whose data has arrived, one per row of the batch.

        Raises:
            SessionError: one session for two rows.
        """
        return self._cache_class(self, sessions)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse numbers that are no tokens of the model.

        Raises:
            ConfigError: it names the lowest and the highest.
        """
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise ConfigError(
                f"token ids {min(tokens)}..{max(tokens)} of a vocabulary of {vocabulary}; use the "
                "model's own tokenizer"
            )

    def wait_for(self, session: Session) -> bool:
        """Poll until a session's load-back has ended; whether it ended within the time-out."""
        deadline = time.monotonic() + self.cache.config.transfer_timeout_s
        while not session.ready:
            for transfer in session.request.waits:
                if not transfer.ended:
                    transfer.ticket.wait(max(0.0, deadline - time.monotonic()))
            self.cache.poll()
            if time.monotonic() > deadline:
                return session.ready
        return True

    def _largest_pool_tokens(self) -> int:
        """Most tokens that a pool has pages for; 0 for a model of states only."""
        pages = [
            each.component.device.capacity // each.component.slots_per_page
            for each in self.cache.mounted
            if each.name in {plan.paged for plan in self.layers}
        ]
        return max(pages, default=0) * self.page_size

    @property
    def room_tokens(self) -> int:
        """The longest sequence that the pools can hold, without a page of slack."""
        pages = [
            component.device.capacity // component.slots_per_page
            for component in self.cache.tree.components
            if component.is_prefix_closed
        ]
        return (min(pages, default=2**30) - 1) * self.page_size

    @property
    def sparse_component(self) -> SparseComponent:
        """The component that keeps keys and values on the host."""
        return SparseComponent.of(self.cache)

    # -- memory

    def plane(self, component: str, layer: int, name: str) -> torch.Tensor:
        """A plane of a component's device pool, `[n_slots, *shape]`."""
        key = (component, layer, name)
        plane = self._planes.get(key)
        if plane is None:
            plane = self._planes[key] = self._pools[component].plane(layer, name)
        return plane

    def rows(self, component: str, layer: int, name: str) -> torch.Tensor:
        """A paged plane with a row per token, `[n_slots * page_size, *shape]`."""
        return self.plane(component, layer, name).flatten(0, 1)

    def views(self, plan: LayerPlan) -> list[Views]:
        """The planes that a layer's attention reads: keys, values, indexer."""
        views = self._views.get(plan.index)
        if views is None:
            assert plan.paged is not None
            find = partial(self.rows, plan.paged, plan.index)
            if plan.sparse:
                planes = []
            elif plan.latent:
                latent = find("latent").unsqueeze(1)
                planes = [latent[..., : plan.key_dim], latent[..., plan.key_dim :]]
            else:
                planes = [find("k"), find("v")]
            if plan.indexer is not None:
                name = "index" if plan.sparse else "latent"
                planes.append(self.rows(plan.indexer, plan.index, name).unsqueeze(1))
            views = [Views.of(rows, self.page_size) for rows in planes]
            self._views[plan.index] = views
        return views

    def host_plane(self, component: str, layer: int, name: str) -> torch.Tensor:
        """A plane of a component's host mirror, `[n_slots, *shape]`."""
        return self._mirrors[component].plane(layer, name)

    def close(self) -> None:
        """Abort open sessions, finish transfers, remove the hooks; no session begins afterwards."""
        for request in list(self.cache.requests.values()):
            self.cache.abort(request)
        while self._undo:
            self._undo.pop()()
        self.cache.close()

    def __enter__(self) -> ModelMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _component_options(
    model: PreTrainedModel,
    architecture: Architecture,
    chunk_tokens: int,
    extra: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Options of each component: its geometry, given options, and defaults for the model."""
    options: dict[str, dict[str, Any]] = {}
    for name, geometry in architecture.components.items():
        package = name.partition("@")[0]
        options[name] = {**geometry, **extra.get(package, {}), **extra.get(name, {})}
        if package == "mamba":
            options[name].setdefault("checkpoint_interval_tokens", chunk_tokens)
        if package == "hisparse":
            options[name].setdefault("hot_tokens", _selected_tokens(model))
    return options


def _open_trial(
    model: PreTrainedModel, architecture: Architecture, page_size: int, device_tokens: int
) -> ModelMemory:
    """A small memory for `kvgraft_transformers.self_check`."""
    settings = {
        "components": _component_options(model, architecture, page_size, {}),
        "page_size": page_size,
        "device": str(model.device),
        "device_tokens": -(-device_tokens // page_size) * page_size,
        "host_tokens": device_tokens if architecture.of_package("hisparse") else 0,
    }
    return ModelMemory(model, architecture, Cache(parse_config(settings)))


def check_chunk(chunk_tokens: int, page_size: int) -> None:
    """Refuse prefill chunks that do not end at page boundaries.

    Raises:
        ConfigError: it names the nearest size that does.
    """
    sizes: dict[str, object] = {"page_size": page_size, "chunk_tokens": chunk_tokens}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"setting {name}={value!r}: give a whole number, 1 or more")
    if chunk_tokens < page_size or chunk_tokens % page_size:
        raise ConfigError(
            f"chunk_tokens {chunk_tokens} is not a multiple of page_size {page_size}; use "
            f"{max(1, chunk_tokens // page_size) * page_size}"
        )


def _check_working(working_tokens: object) -> None:
    """Refuse a limit that is no number of tokens.

    Raises:
        ConfigError: it names the allowed values.
    """
    known = isinstance(working_tokens, int) and not isinstance(working_tokens, bool)
    if working_tokens is not None and not (known and int(working_tokens) >= 0):  # type: ignore[call-overload]
        raise ConfigError(
            f"setting working_tokens={working_tokens!r}: give a whole number of tokens; 0 keeps "
            "no working copies, None as many tokens as the largest pool"
        )


def _options_by_name(components: object) -> dict[str, dict[str, Any]]:
    """Options per component or package, as a new dictionary.

    Raises:
        ConfigError: something else.
    """
    named: dict[str, Any] = (
        dict(components) if isinstance(components, Mapping) else {"": components}
    )
    if not all(isinstance(options, Mapping) for options in named.values()):
        raise ConfigError(
            f"setting components={components!r:.60}: give options by name, such as "
            "{'full': {'device_tokens': 4096}}"
        )
    return {name: dict(options) for name, options in named.items()}


def _configure(
    model: PreTrainedModel,
    settings: dict[str, Any],
    storage: str | Mapping[str, Any] | StorageSettings | None,
) -> CacheConfig:
    """Settings of the cache; weights are digested after all other settings were checked."""
    if storage is None:
        return parse_config(settings)
    options = storage_options(model, storage)
    config = parse_config({**settings, "storage": {"weights": "of the model", **options}})
    if "weights" in options:
        return config
    assert config.storage is not None
    named = config.storage.model_copy(update={"weights": digest_weights(model)})
    return config.model_copy(update={"storage": named})


def _expect_model(model: object) -> None:
    """Refuse an object that is no model of transformers, such as a model's name.

    Raises:
        ConfigError: it says how to load one.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model {model!r:.60} is a {type(model).__name__}, no model of transformers; load it "
            "with AutoModelForCausalLM.from_pretrained(...) and give that model"
        )


def _one_row(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    """Token ids as a list.

    Raises:
        ConfigError: a batch of more than one row, or a value that is no token id.
    """
    if not isinstance(input_ids, torch.Tensor):
        try:
            input_ids = torch.as_tensor(input_ids) if len(input_ids) else torch.tensor([0])[:0]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"input_ids={input_ids!r:.60}: give token ids, a list of them or a tensor [n] or "
                "[1, n]; a tokenizer makes them of text"
            ) from error
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ConfigError(f"input_ids of {input_ids.dtype}: give token ids, integers")
    if input_ids.dim() == 2 and len(input_ids) == 1:
        input_ids = input_ids[0]
    if input_ids.dim() != 1:
        raise ConfigError(
            f"input_ids of shape {list(input_ids.shape)}: a session is one sequence; open a "
            "session per row"
        )
    return [int(token) for token in input_ids.tolist()]


def _selected_tokens(model: PreTrainedModel) -> int:
    """Tokens a query of a sparse layer selects at most."""
    selected = getattr(model.config.get_text_config(decoder=True), "index_topk", None)
    return 2048 if selected is None else int(selected)
