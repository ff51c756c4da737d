"""`kvgraft dynamo-worker`. Imports Dynamo, torch and transformers only when it runs."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib import metadata
from typing import Any

import click

from kvgraft import ConfigError
from kvgraft_transformers.serving.checkpoint import find_checkpoint
from kvgraft_transformers.serving.command import load_served_model, serve

__all__ = ["dynamo_worker"]

OF_THE_SERVER = {"host", "port", "api_key", "grace_s", "log_requests"}
"""Options of `kvgraft serve` about HTTP, which Dynamo's frontend speaks."""

OF_EVENTS = {"kv_events", "kv_events_replay", "kv_events_topic", "kv_events_report"}
"""Options of its KV events, which a worker always publishes, for Dynamo alone."""

VERSION = "1.6"
"""The minor version of Dynamo: its interface for engines changes between them."""


def engine_options(command: click.Command) -> click.Command:
    """Add the options of `kvgraft serve` about model, engine and cache."""
    left_out = OF_THE_SERVER | OF_EVENTS
    command.params += [each for each in serve.params if each.name not in left_out]
    return command


@engine_options
@click.command("dynamo-worker")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine on which Dynamo's frontends and routers reach the worker.",
)
@click.option(
    "--namespace",
    default="dynamo",
    show_default=True,
    envvar="DYN_NAMESPACE",
    help="Dynamo's namespace of the fleet.",
)
@click.option(
    "--component",
    help="Dynamo's name for workers that serve alike.  [default: prefill for that role, backend]",
)
@click.option(
    "--role",
    default="both",
    show_default=True,
    type=click.Choice(["both", "prefill", "decode"]),
    help="Compute requests whole, or only prompts, or the rest behind those that others computed.",
)
@click.option(
    "--discovery-backend",
    default="file",
    show_default=True,
    envvar="DYN_DISCOVERY_BACKEND",
    type=click.Choice(["file", "etcd", "kubernetes"]),
    help="How frontends find the worker; file: in the directory DYN_FILE_KV, on one machine.",
)
def dynamo_worker(
    model: str,
    host: str,
    namespace: str,
    component: str | None,
    role: str,
    discovery_backend: str,
    **options: Any,
) -> None:
    """Serve MODEL as a worker of NVIDIA Dynamo.

    MODEL is a directory or a name on the model hub; frontends read its tokenizer from there, too.

    The worker takes requests from Dynamo's frontends, and tells their KV routers which prefixes
    its cache holds. Start `python -m dynamo.frontend --router-mode kv --discovery-backend file`
    beside it. SIGTERM and Ctrl-C end it once running requests have ended.
    """
    local = find_checkpoint(model)
    _expect_dynamo()
    os.environ.setdefault("DYN_TCP_RPC_HOST", host)
    os.environ.setdefault("DYN_EVENT_PLANE_HOST", host)
    logging.basicConfig(format="%(asctime)s %(message)s")
    options |= dict.fromkeys(OF_EVENTS)
    options |= {"kv_events": "tcp://127.0.0.1:*", "kv_events_report": "resumable", "api_key": None}
    served = load_served_model(model, options, local=local)
    from dynamo.common.backend import Worker, WorkerConfig

    from kvgraft_dynamo.handing import Handing, Role
    from kvgraft_dynamo.worker import DynamoEngine, mode_of

    part = Role(role)
    handing = None if part is Role.BOTH else asyncio.run(Handing.open(served.worker, served.name))
    engine = DynamoEngine(served, model, part, handing)
    component = component or ("prefill" if part is Role.PREFILL else "backend")
    config = WorkerConfig(
        namespace=namespace,
        component=component,
        model_name=model,
        served_model_name=served.name,
        endpoint_types="chat,completions"
        if getattr(served.tokenizer.backend, "chat_template", None)
        else "completions",
        discovery_backend=discovery_backend,
        event_plane="zmq",
        disaggregation_mode=mode_of(part),
    )
    click.echo(f"worker of {served.name!r} in {namespace}/{component} (stop with Ctrl-C)", err=True)
    try:
        asyncio.run(Worker(engine, config).run())
    finally:
        served.worker.stop()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1 if engine.failed else 0)


def _expect_dynamo() -> None:
    """Refuse to start without a Dynamo that this package knows.

    Raises:
        ConfigError: it says how to install one.
    """
    names = " ".join(f"'{name}=={VERSION}.*'" for name in ("ai-dynamo", "ai-dynamo-runtime"))
    how = f"pip install --no-deps {names} uvloop"
    try:
        import dynamo.common.backend  # noqa: F401

        found = metadata.version("ai-dynamo")
    except (ImportError, metadata.PackageNotFoundError) as error:
        missing = getattr(error, "name", None) or "dynamo"
        raise ConfigError(
            f"kvgraft dynamo-worker needs Dynamo, and there is no {missing}: {how}"
        ) from error
    if found.split(".")[:2] != VERSION.split("."):
        raise ConfigError(f"Dynamo {found}: this version works with {VERSION}: {how}")
