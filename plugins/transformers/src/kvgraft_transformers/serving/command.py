"""`kvgraft serve`. Imports torch and transformers only when it runs, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvgraft import ConfigError, GuardMode
from kvgraft.config import CacheConfig, parse_config
from kvgraft_cli.cache_options import (
    PolicyName,
    check_tenants,
    cut_tokens_option,
    memory_options,
    parse_tenants,
    pool_sizes,
    tenant_option,
    write_policy_option,
)
from kvgraft_cli.sizes import PoolSize, TokenCount, WholeNumber
from kvgraft_storage import PrefetchPolicy, StorePolicy
from kvgraft_transformers.serving.checkpoint import (
    check_device,
    expect_same_tokens,
    find_checkpoint,
    load_tokenizer,
    load_weights,
)

if TYPE_CHECKING:
    from kvgraft_observe.kv_events import KvEventPublisher
    from kvgraft_storage import StorageBackend
    from kvgraft_transformers.engine import Engine
    from kvgraft_transformers.serving.app import ServedModel

__all__ = ["serve"]

TOKENS = TokenCount(min=1)

log = logging.getLogger("kvgraft.serve")


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=WholeNumber(0, 65535),
    help="Port; 0 for any free one.",
)
@click.option("--name", help="Name clients ask for; MODEL's last part by default.")
@click.option("--api-key", envvar="KVGRAFT_API_KEY", help="Key that clients must send.")
@click.option("--device", default="cpu", show_default=True, help="Torch device of the model.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "bfloat16", "float16", "float32", "float64"]),
    help="Element type of the weights; auto for the checkpoint's own.",
)
@click.option("--page-size", default=16, show_default=True, type=TOKENS, help="Tokens per page.")
@click.option(
    "--device-tokens",
    default=65_536,
    show_default=True,
    type=PoolSize(min=1),
    help="Size of device pools: tokens, such as 64k, or bytes of all of them, such as 40GB.",
)
@click.option(
    "--host-tokens",
    default=262_144,
    show_default=True,
    type=PoolSize(min=0),
    help="Size of host mirrors, as for the device; 0 for none.",
)
@memory_options
@click.option(
    "--policy",
    type=PolicyName(),
    metavar="NAME",
    default=CacheConfig.model_fields["policy"].get_default(call_default_factory=True),
    show_default=True,
    help="Eviction policy: which data is kept.",
)
@write_policy_option
@tenant_option
@cut_tokens_option(None, "128, or --chunk-tokens where these are fewer")
@click.option(
    "--chunk-tokens",
    default=512,
    show_default=True,
    type=TOKENS,
    help="Prompt tokens per request and pass; recurrent states are kept at its multiples.",
)
@click.option(
    "--step-tokens",
    default=2048,
    show_default=True,
    type=TOKENS,
    help="Most tokens over all requests in one step.",
)
@click.option(
    "--max-running",
    default=16,
    show_default=True,
    type=WholeNumber(min=1),
    help="Requests that hold memory at a time.",
)
@click.option(
    "--max-drafts",
    default=0,
    show_default=True,
    type=WholeNumber(min=0),
    help="Tokens that prompt lookup drafts for a request, at most; a pass verifies them together.",
)
@click.option(
    "--draft-model",
    metavar="MODEL",
    help="A smaller model with the same tokenizer: it makes the drafts instead of prompt lookup, "
    "with pools of its own for as many tokens.",
)
@click.option(
    "--working-tokens",
    type=TokenCount(min=0),
    help="Tokens of running requests that are kept twice, to decode faster; 0 for none.  "
    "[default: as many as the largest device pool holds]",
)
@click.option("--sparse-on-host", is_flag=True, help="Keep K/V of indexed layers on the host.")
@click.option(
    "--storage",
    metavar="URL",
    help="Store that keeps the host's data beyond this process: file:PATH?capacity=10GiB.",
)
@click.option(
    "--store-policy",
    type=click.Choice([policy.value for policy in StorePolicy]),
    help="When data goes to storage.  [default: second-touch]",
)
@click.option(
    "--prefetch-policy",
    type=click.Choice([policy.value for policy in PrefetchPolicy]),
    help="How long requests wait for it.  [default: timeout, of 1 s]",
)
@click.option(
    "--kv-events",
    metavar="ADDRESS",
    help="Publish KV events for routers, in vLLM's format, at an address such as tcp://*:5557.",
)
@click.option(
    "--kv-events-replay",
    metavar="ADDRESS",
    help="Address at which subscribers ask for the batches that they missed.",
)
@click.option(
    "--kv-events-topic", metavar="TEXT", help="Topic of the messages; llm-d reads kv@POD@MODEL."
)
@click.option(
    "--kv-events-report",
    type=click.Choice(["components", "resumable"]),
    help="Report the blocks of each component, or those up to which requests could resume, for "
    "routers that index one group.  [default: components]",
)
@click.option(
    "--guard",
    default=GuardMode.OFF.value,
    show_default=True,
    type=click.Choice([mode.value for mode in GuardMode]),
    help="Check the contract while serving.",
)
@click.option(
    "--threads",
    type=WholeNumber(min=1),
    help="Threads torch computes with; its own choice by default.",
)
@click.option(
    "--grace",
    "grace_s",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds from SIGTERM or Ctrl-C to the end; requests may go on until the last of them.",
)
@click.option(
    "--log-requests/--no-log-requests",
    default=True,
    show_default=True,
    help="Write a line for every request to standard error.",
)
def serve(
    model: str,
    host: str,
    port: int,
    grace_s: float,
    log_requests: bool,  # noqa: FBT001 - click gives options by name
    **options: Any,
) -> None:
    """Serve MODEL over HTTP.

    MODEL is a directory or a name on the model hub.

    The API is OpenAI's: /v1/completions, /v1/chat/completions (both streaming) and /v1/models;
    /health and /metrics besides. Prompts that begin alike are computed once; `usage` says how many
    tokens were cached.

    SIGTERM and Ctrl-C end it with status 0, within --grace seconds: new requests get 503 at once,
    those that run go on until a second is left, and the rest then gets 503 or, as a stream, an
    error event. A second signal does not wait.
    """
    if options["api_key"] is not None and not options["api_key"].strip():
        raise ConfigError("--api-key is empty; give a key, or leave it out to let everybody in")
    local = find_checkpoint(model)
    try:
        import uvicorn

        import kvgraft_observe.prometheus  # noqa: F401 - for the metrics
    except ImportError as error:
        raise ConfigError(
            f"kvgraft serve needs an HTTP server and metrics, and there is no {error.name}; in a "
            "clone of kvgraft, pip install ./plugins/observe './plugins/transformers[serve]'"
        ) from error
    from kvgraft_transformers.serving.app import build_app
    from kvgraft_transformers.serving.shutdown import LAST_WORDS_S, DrainingServer

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("kvgraft").setLevel(logging.INFO)  # other loggers report their own requests
    with _listen(host, port) as listener:
        served = load_served_model(model, options, local=local)
        where = f"http://{host}:{listener.getsockname()[1]}/v1"
        click.echo(f"serving {served.name!r} on {where} (stop with Ctrl-C)", err=True)
        app = build_app(served, log_requests=log_requests)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=LAST_WORDS_S)
        server = DrainingServer(config, served.worker, grace_s)
        server.run(sockets=[listener])
    server.tell_totals()
    if served.worker.runs:
        log.warning("the engine is cut off in a pass, or while it waits for a copy")
    # Python would take seconds to free torch's modules, and wait for abandoned threads.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _listen(host: str, port: int) -> socket.socket:
    """Open the socket, before anything is loaded."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error


def load_served_model(model: str, options: dict[str, Any], *, local: bool) -> ServedModel:
    """Model, tokenizer and engine, ready to serve.

    Args:
        model: a directory or a name on the model hub.
        options: options of the running command.
        local: whether all files are on this machine.

    Raises:
        ConfigError: the model cannot be found or loaded, or no component serves it.
    """
    import torch
    from transformers.utils import logging as progress

    from kvgraft_transformers.engine import DraftModel, Engine, EngineSettings
    from kvgraft_transformers.memory import check_chunk
    from kvgraft_transformers.serving.app import ServedModel
    from kvgraft_transformers.serving.split import memory_split
    from kvgraft_transformers.serving.text import Tokenizer
    from kvgraft_transformers.serving.worker import EngineWorker
    from kvgraft_transformers.versions import check_transformers

    check_transformers()
    memory = dict(options)
    name, api_key = memory.pop("name"), memory.pop("api_key")
    device, dtype = memory.pop("device"), memory.pop("dtype")
    check_device(device)
    threads = memory.pop("threads")
    publishing = _take_kv_events(memory)
    named = ("chunk_tokens", "step_tokens", "max_running", "max_drafts")
    limits = {each: memory.pop(each) for each in named}
    check_chunk(limits["chunk_tokens"], memory["page_size"])
    draft_model = memory.pop("draft_model")
    drafts_local = draft_model is not None and _find_draft_model(draft_model, limits["max_drafts"])
    memory |= _take_cache_settings(memory)
    if threads is not None:
        torch.set_num_threads(threads)
    if not sys.stderr.isatty():
        progress.disable_progress_bar()
    with contextlib.ExitStack() as undo:
        store = _open_store(memory)
        if store is not None:
            undo.callback(store.close)
        tokenizer = load_tokenizer(model, local=local)
        if draft_model is not None:
            drafts_tokenizer = load_tokenizer(draft_model, local=drafts_local)
            expect_same_tokens(draft_model, drafts_tokenizer, model, tokenizer)
        weights = load_weights(model, device, dtype, local=local)
        engine = Engine.open(weights, EngineSettings(**limits), **memory)
        undo.callback(engine.close)
        if draft_model is not None:
            drafts = load_weights(draft_model, device, dtype, local=drafts_local)
            engine.drafter = DraftModel.open(
                drafts,
                chunk_tokens=limits["chunk_tokens"],
                page_size=memory["page_size"],
                device_tokens=engine.memory.room_tokens + memory["page_size"],
                load=None,
            )
        if store is not None:
            engine.memory.cache.storage.attach(store)
        publisher = _publish_events(engine, publishing)
        undo.pop_all()
    for line in memory_split(engine.memory):
        click.echo(line, err=True)
    worker = EngineWorker(engine, () if publisher is None else (publisher.close,))
    worker.start()
    text_config = weights.config.get_text_config(decoder=True)
    context = getattr(text_config, "max_position_embeddings", None)
    return ServedModel(
        name=name or Path(model).name,
        worker=worker,
        tokenizer=Tokenizer(tokenizer),
        context_tokens=int(context or engine.memory.room_tokens),
        room_tokens=engine.memory.room_tokens,
        api_key=api_key,
        kv_events=None if publisher is None else publisher.endpoint,
    )


def _take_kv_events(options: dict[str, Any]) -> dict[str, Any] | None:
    """Take the publisher's options out of those given; None without a publisher.

    Raises:
        ConfigError: its other options without its address, no package for it, or an address that
            cannot be listened on.
    """
    bind = options.pop("kv_events")
    named = ("kv_events_replay", "kv_events_topic", "kv_events_report")
    given = {name: value for name in named if (value := options.pop(name)) is not None}
    if bind is None:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{option} without --kv-events; give --kv-events tcp://*:5557")
        return None
    try:
        from kvgraft_observe.kv_events import expect_addresses
    except ImportError as error:
        raise ConfigError(
            f"--kv-events needs pyzmq and msgspec, and there is no {error.name}; in a clone of "
            "kvgraft, pip install './plugins/observe[kv-events]'"
        ) from error
    expect_addresses(bind, *([given["kv_events_replay"]] if "kv_events_replay" in given else []))
    return {"bind": bind, **{name.removeprefix("kv_events_"): given[name] for name in given}}


def _publish_events(engine: Engine, publishing: dict[str, Any] | None) -> KvEventPublisher | None:
    """Publish the events of an engine's cache, if that is asked for.

    Raises:
        ConfigError: an address that cannot be used, such as one that another took meanwhile.
    """
    if publishing is None:
        return None
    from kvgraft_observe.kv_events import KvEventPublisher

    publisher = KvEventPublisher(engine.memory.cache, **publishing)
    click.echo(f"KV events: {publisher.endpoint}", err=True)
    return publisher


def _find_draft_model(draft_model: str, max_drafts: int) -> bool:
    """Whether all files of the draft model are on this machine.

    Raises:
        ConfigError: it cannot be found, or no drafts are asked for.
    """
    if not max_drafts:
        raise ConfigError("--draft-model makes no drafts with --max-drafts 0; give --max-drafts 4")
    return find_checkpoint(draft_model)


def _take_cache_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Take the cache's settings out of the options, and check them before anything is loaded.

    Raises:
        ConfigError: settings that work for no model.
    """
    check_tenants(options)
    settings = pool_sizes(options)
    for name in ("device_tokens", "host_tokens", "device_memory", "host_memory"):
        del options[name]
    settings["tenants"] = parse_tenants(options.pop("tenants"))
    for name in ("policy", "write_policy", "cut_tokens"):
        value = options.pop(name)
        if value is not None:
            settings[name] = value
    parse_config({"components": ["any"], "page_size": options["page_size"], **settings})
    return settings


def _open_store(options: dict[str, Any]) -> StorageBackend | None:
    """Open the store before anything is loaded; leaves the settings of its tier in the options.

    Raises:
        ConfigError: the store cannot be opened or used, or policies are given without one.
    """
    from kvgraft_storage import open_storage

    url = options.pop("storage")
    policies = {"store": options.pop("store_policy"), "prefetch": options.pop("prefetch_policy")}
    given = {name: value for name, value in policies.items() if value is not None}
    if url is None:
        if given:
            raise ConfigError(f"--{next(iter(given))}-policy without --storage; give --storage URL")
        return None
    if not options.get("host_tokens") and "host_memory" not in options:
        raise ConfigError("--storage with --host-tokens 0: storage is filled from the host")
    options["storage"] = given
    return open_storage(url)
