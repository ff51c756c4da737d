"""The routes of the server, over one engine and one tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvgraft_retention.kv_hints import arguments_of
from kvgraft_transformers import serving
from kvgraft_transformers.engine import GenerationRequest
from kvgraft_transformers.serving.answers import Answers, Piece, Prompts
from kvgraft_transformers.serving.grammar import Grammars
from kvgraft_transformers.serving.inspection import Inspection
from kvgraft_transformers.serving.metrics import ServerMetrics
from kvgraft_transformers.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    parse_chat,
    parse_completion,
    shutdown_refusal,
)
from kvgraft_transformers.serving.replies import Reply, WholeAnswer
from kvgraft_transformers.serving.request_log import Record, RequestLog, record_of
from kvgraft_transformers.serving.text import Tokenizer
from kvgraft_transformers.serving.worker import EngineFailureError, EngineWorker

__all__ = ["ServedModel", "build_app"]

CLIENT_LEFT = "the client left"
"""Reason in the log for an answer whose client has gone."""

CLIENT_CLOSED = 499
"""Status in the log if the client has gone; there is no standard one."""

BODY_BYTES, BODY_BYTES_PER_TOKEN = 2**16, 32
"""Largest body: so many bytes, plus a long escaped word for each token of the context."""

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'"
)
"""Sources that the page may load: itself and this server."""

NO_BUFFERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of streams, against buffering by proxies."""

COMPLETION_TOKENS = 16
"""Default of `/v1/completions`, as in OpenAI's API."""

CHAT_TOKENS = 512
"""Default of `/v1/chat/completions`, if the model's context has so much left."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that one server serves.

    Attributes:
        name: its name for clients.
        worker: the engine's running thread.
        tokenizer: the model's tokenizer.
        context_tokens: the model's longest sequence.
        room_tokens: the longest sequence that its pools can hold.
        api_key: the key that clients must send; None for no key.
        kv_events: the address of its published KV events; None where none are.
    """

    name: str
    worker: EngineWorker
    tokenizer: Tokenizer
    context_tokens: int
    room_tokens: int
    api_key: str | None = None
    kv_events: str | None = None


class _Stream(StreamingResponse):
    """A stream that aborts its answers when the client has gone."""

    def __init__(self, events: AsyncIterator[str], answers: Answers, record: Record) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers=NO_BUFFERS,
        )
        self._answers = answers
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; see `StreamingResponse`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._answers.ended and not self._record.refusal:
                self._record.refusal = CLIENT_LEFT
            self._answers.cancel()


def build_app(served: ServedModel, *, log_requests: bool = False) -> Starlette:
    """Build the ASGI application; it stops the worker when it shuts down.

    Args:
        served: the model.
        log_requests: write a line to the log for every request.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, served.worker.stop)

    endpoints = _Endpoints(served)
    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/metrics", endpoints.metrics, methods=["GET"]),
            Route("/", endpoints.page, methods=["GET"]),
            Route("/cache", endpoints.cache, methods=["GET"]),
            Route("/explain", endpoints.explain, methods=["POST"]),
            Route("/events", endpoints.events, methods=["GET"]),
            Route("/reset_prefix_cache", endpoints.reset_prefix_cache, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _refuse,
            EngineFailureError: _refuse_stopped,
            HTTPException: _refuse_route,
            ClientDisconnect: _nobody_reads,
            Exception: _fail,
        },
        middleware=[Middleware(RequestLog)] if log_requests else [],
        lifespan=lifespan,
    )


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record_of(request).refusal = str(error)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def _refuse_stopped(request: Request, error: Exception) -> Response:
    record_of(request).refusal = str(error)
    refusal = ApiError(str(error), status=503)
    return JSONResponse(refusal.body, status_code=refusal.status)


def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        served = [each.path for each in request.app.routes if "{" not in each.path]
        message += "; served here are " + ", ".join(served)
    return JSONResponse(ApiError(message).body, status_code=error.status_code)


def _fail(_: Request, error: Exception) -> Response:
    """Answer an internal error in the API's form; Starlette logs the traceback."""
    message = f"the server failed: {type(error).__name__}"
    return JSONResponse(ApiError(message, status=500).body, status_code=500)


def _nobody_reads(request: Request, _: Exception) -> Response:
    record_of(request).refusal = CLIENT_LEFT
    return Response(status_code=CLIENT_CLOSED)


class _Endpoints:
    """One function per route."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.created = int(time.time())
        self._metrics = ServerMetrics(served.worker)
        self._grammars = Grammars(served.tokenizer.backend, served.worker.engine.end_tokens)
        self._page = resources.files(serving).joinpath("page.html").read_text("utf-8")
        self._inspection = Inspection(served.worker)
        self._most_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * served.context_tokens

    # -- answers

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        asked: CompletionRequest = parse_completion(await self._body(request))
        self._check_model(asked.model)
        prompts = await run_in_threadpool(self._encode_prompts, asked)
        reply = self._open_reply(asked, chat=False)
        limit = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        echoed: Sequence[str] = ()
        if asked.echo:
            echoed = await run_in_threadpool(self._prompt_texts, asked, prompts)
        return await self._reply(request, asked, prompts, limit, reply, echoed=echoed)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        asked: ChatRequest = parse_chat(await self._body(request))
        self._check_model(asked.model)
        prompt, resume_at = await run_in_threadpool(self._encode_chat, asked)
        room = min(self.served.context_tokens, self.served.room_tokens) - len(prompt)
        limit = asked.limit_tokens or max(1, min(CHAT_TOKENS, room))
        reply = self._open_reply(asked, chat=True)
        return await self._reply(request, asked, [prompt], limit, reply, resume_at)

    def _open_reply(self, asked: CompletionRequest | ChatRequest, *, chat: bool) -> Reply:
        logprobs = asked.n_logprobs is not None
        return Reply(asked.model, chat, self.served.tokenizer, logprobs)

    def _prompt_texts(self, asked: CompletionRequest, prompts: list[list[int]]) -> list[str]:
        """The prompts as answers begin with them: texts as they were given, tokens decoded."""
        decode = self.served.tokenizer.backend.decode
        return [
            given if isinstance(given, str) else decode(tokens)
            for given, tokens in zip(asked.prompts(), prompts)
        ]

    def _encode_prompts(self, asked: CompletionRequest) -> list[list[int]]:
        encode = self.served.tokenizer.encode
        return [encode(each) if isinstance(each, str) else each for each in asked.prompts()]

    def _encode_chat(self, asked: ChatRequest) -> tuple[list[int], list[int]]:
        """The prompt of a chat, and at most two positions where other prompts will differ.

        Other chats differ behind the system messages, and the next turn behind the user's last
        message. Short prompts are not worth a pass of the model.
        """
        tokenizer = self.served.tokenizer
        variables = asked.chat_template_kwargs
        prompt = tokenizer.encode_chat(asked.messages, variables)
        ends = [
            find(asked.messages, prompt, variables)
            for find in (tokenizer.system_tokens, tokenizer.next_turn_tokens)
        ]
        least = self.served.worker.engine.memory.cache.config.cut_tokens
        return prompt, [end for end in ends if end >= max(1, least)]

    async def _reply(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[list[int]],
        limit_tokens: int,
        reply: Reply,
        resume_at: Sequence[int] = (),
        echoed: Sequence[str] = (),
    ) -> Response:
        grammar = None
        if (schema := asked.schema_of_answer) is not None:
            grammar = await run_in_threadpool(self._grammars.compile, schema)
        generations = [
            dataclasses.replace(each, constraint=grammar and grammar.copy())
            for each in self._generations(asked, prompts, limit_tokens, resume_at)
        ]
        record = record_of(request)
        record.reply = reply
        answers = Answers(
            self.served.worker,
            self.served.tokenizer,
            generations,
            asked.n,
            asked.stop,
            reply.usage,
            record.reasons,
            Prompts(
                echoed,
                tells_all=asked.prompt_logprobs is not None,
                choices=reply.logprobs and asked.n_prompt_logprobs is not None,
                alone=limit_tokens == 0,
            ),
        )
        try:
            pieces = answers.pieces()
            # refuse a request before the first byte of a stream
            first = await _or_gone(request, pieces.__anext__)
            record.first = time.monotonic()
            if asked.stream:
                events = _events(record, len(generations), first, pieces, asked.stream_options)
                return _Stream(events, answers, record)
            whole = await _or_gone(request, lambda: _collect(len(generations), first, pieces))
        except BaseException:
            answers.cancel()
            raise
        return JSONResponse(reply.whole(whole))

    def _generations(
        self,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[list[int]],
        limit_tokens: int,
        resume_at: Sequence[int],
    ) -> list[GenerationRequest]:
        if not prompts:
            raise ApiError("no prompt", param="prompt")
        context = self.served.context_tokens
        for prompt in prompts:
            if not prompt:
                raise ApiError("the prompt has no token", param="prompt")
            if len(prompt) + limit_tokens > context:
                raise ApiError(
                    f"{len(prompt)} prompt tokens + {limit_tokens} to produce > {context}, the "
                    "model's context; shorten the prompt or ask for fewer",
                    code="context_length_exceeded",
                )
            beyond = [each for each in asked.resume_at if each > len(prompt)]
            if beyond:
                raise ApiError(
                    f"resume_at {beyond[0]} is behind the end of a prompt of {len(prompt)} tokens",
                    param="resume_at",
                )
        return [
            GenerationRequest(
                tokens=prompt,
                max_new_tokens=max(1, limit_tokens),  # of a prompt alone it is left out
                sampling=asked.sampling(index),
                min_new_tokens=asked.min_tokens,
                stop_tokens=frozenset(asked.stop_token_ids),
                ignore_end=asked.ignore_eos,
                namespace=asked.cache_salt,
                resume_at=(*asked.resume_at, *resume_at),
                priority=asked.priority,
                hints=arguments_of(asked.kv_hints),
                prompt_logprobs=None if index else asked.n_prompt_logprobs,
            )
            for prompt in prompts
            for index in range(asked.n)
        ]

    # -- the cache

    async def cache(self, request: Request) -> Response:
        """`GET /cache`: the content of the pools, and recent requests with their hits."""
        self._check_key(request)
        return JSONResponse(await self._inspection.state())

    async def page(self, _: Request) -> Response:
        """`GET /`: a page that shows `/cache`."""
        return HTMLResponse(self._page, headers={"Content-Security-Policy": PAGE_POLICY})

    async def explain(self, request: Request) -> Response:
        """`POST /explain`: for the body of a completion or a chat, why it would not hit deeper."""
        body = await self._body(request)
        asked: CompletionRequest | ChatRequest
        if isinstance(body, dict) and "messages" in body:
            asked = parse_chat(body)
            prompts = [(await run_in_threadpool(self._encode_chat, asked))[0]]
        else:
            asked = parse_completion(body)
            prompts = await run_in_threadpool(self._encode_prompts, asked)
        self._check_model(asked.model)
        if len(prompts) != 1 or not prompts[0]:
            raise ApiError(f"{len(prompts)} prompts; send one of at least 1 token", param="prompt")
        return JSONResponse(await self._inspection.explain(prompts[0], asked.cache_salt))

    async def events(self, request: Request) -> Response:
        """`GET /events`: every change of the cache, as server-sent events."""
        self._check_key(request)
        events = self._inspection.events()
        first = await anext(events)
        return StreamingResponse(
            _behind(first, events), media_type="text/event-stream", headers=NO_BUFFERS
        )

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`POST /reset_prefix_cache`: drop all cached data; running requests continue."""
        self._check_key(request)
        return JSONResponse(await self._inspection.clear())

    # -- the rest

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._describe())

    async def health(self, _: Request) -> Response:
        """`GET /health`: 200 while requests are accepted."""
        worker = self.served.worker
        taking = worker.alive and not worker.draining
        status = "ok" if taking else "stopping" if worker.alive else "stopped"
        return JSONResponse(
            {"status": status, "model": self.served.name}, status_code=200 if taking else 503
        )

    async def metrics(self, _: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvgraft",
            "max_model_len": min(self.served.context_tokens, self.served.room_tokens),
        }

    async def _body(self, request: Request) -> object:
        self._check_key(request)
        if self.served.worker.draining:
            raise shutdown_refusal("the server is shutting down and takes no more requests")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._most_bytes:
                raise ApiError(
                    f"the body is larger than {self._most_bytes:,} bytes, enough for one prompt as "
                    "long as the model's context; send several prompts one by one, or shorter ones",
                    status=413,
                    code="request_too_large",
                )
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is no JSON: {error}") from error

    def _check_key(self, request: Request) -> None:
        key = self.served.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").strip().partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if scheme.lower() != "bearer" or not right:
            message = "wrong API key" if scheme.lower() == "bearer" else "no API key"
            raise ApiError(
                f"{message}; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_model(self, name: str) -> None:
        if name != self.served.name:
            raise ApiError(
                f"model {name!r} is not served here; {self.served.name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )


async def _behind(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for each in rest:
        yield each


async def _or_gone(request: Request, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, unless the client disconnects first.

    Raises:
        ClientDisconnect: it disconnected.
    """
    work = asyncio.ensure_future(call())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for future in (work, gone):
            future.cancel()
            with contextlib.suppress(BaseException):
                await future


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _collect(n_answers: int, first: Piece, pieces: AsyncIterator[Piece]) -> list[WholeAnswer]:
    """The whole text of all answers."""
    answers = [WholeAnswer() for _ in range(n_answers)]
    piece: Piece | None = first
    while piece is not None:
        answer = answers[piece.answer]
        answer.text += piece.text
        answer.reason = piece.reason or answer.reason
        answer.choices += piece.choices
        answer.prompt = piece.prompt or answer.prompt
        piece = await anext(pieces, None)
    return answers


async def _events(
    record: Record,
    n_answers: int,
    first: Piece,
    pieces: AsyncIterator[Piece],
    options: StreamOptions | None,
) -> AsyncIterator[str]:
    """Server-sent events: chunks, the usage if requested, and the end mark."""
    reply = record.reply
    assert reply is not None
    with_usage = options is not None and options.include_usage
    reply.tells_usage = with_usage and options is not None and options.continuous_usage_stats
    for index in range(n_answers):
        opening = reply.opening(index)
        if opening is not None:
            yield _event(opening)
    piece: Piece | None = first
    try:
        while piece is not None:
            if piece.text:
                yield _event(reply.piece(piece.answer, piece.text, piece.choices))
            if piece.reason is not None:
                yield _event(reply.ending(piece.answer, piece.reason, piece.choices))
            piece = await anext(pieces, None)
    except ApiError as error:
        record.refusal = str(error)
        yield _event(error.body)
        return
    if with_usage:
        yield _event(reply.totals())
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
