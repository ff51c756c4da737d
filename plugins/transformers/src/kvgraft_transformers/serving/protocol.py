"""Requests of clients: the supported fields of OpenAI's API, and refusals of others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StrictInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from kvgraft import ConfigError, SettingsModel
from kvgraft.refusals import wanted
from kvgraft_retention.kv_hints import arguments_of
from kvgraft_transformers.engine.sampling import Sampling

__all__ = [
    "ApiError",
    "ChatRequest",
    "CompletionRequest",
    "Message",
    "StreamOptions",
    "parse_chat",
    "parse_completion",
    "shutdown_refusal",
]

MOST_STOPS = 4
"""Most stop strings per request, as in OpenAI's API."""

MOST_LOGPROBS = 20
"""Most `top_logprobs` per position, as in OpenAI's chats and by default in vLLM."""

RETRY_AFTER_S = 1
"""Seconds after which a client may retry, at another server or at this address."""

LONGEST_ECHO = 80
"""Most characters of a wrong value in an error."""

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        # a hint for routers between servers; `cache_salt` is what separates prompts
        "prompt_cache_key",
    }
)
"""Fields that change no answer; accepted and ignored."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""Unsupported fields, with the values that mean nothing and are accepted."""

INSTEAD = {
    "audio": "answers are text",
    "functions": "describe them in a message",
    "guided_grammar": "response_format takes JSON schemas",
    "guided_json": "give the schema as response_format",
    "guided_regex": "response_format takes JSON schemas",
    "input": "give prompt to /v1/completions, or messages to /v1/chat/completions",
    "json_schema": "give it inside response_format",
    "max_new_tokens": "give max_tokens",
    "max_output_tokens": "give max_tokens",
    "messages": "send them to /v1/chat/completions",
    "modalities": "answers are text",
    "prompt": "send it to /v1/completions, or messages here",
    "regex": "response_format takes JSON schemas",
    "structured_outputs": "give a JSON schema as response_format",
    "tools": "describe them in a message",
}
"""Advice for unsupported fields, some of other servers' APIs."""

PARTS = {
    "audio_url": "audio clips",
    "file": "files",
    "image": "images",
    "image_url": "images",
    "input_audio": "audio clips",
    "input_image": "images",
    "video": "videos",
    "video_url": "videos",
}
"""Names of parts of messages other than text, by their type."""

PROMPTS = "give a text, a list of texts, token ids, or lists of token ids"


class ApiError(Exception):
    """An error in the format of OpenAI's API.

    Attributes:
        status: HTTP status.
        body: JSON of the response.
        headers: additional headers.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.headers = dict(headers or {})
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        super().__init__(message)


def shutdown_refusal(message: str) -> ApiError:
    """The refusal for a request that a stopping server cannot answer."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(message, status=503, code="server_shutting_down", headers=retry)


class _Request(SettingsModel):
    """Fields of both endpoints; some of them are vLLM's, not OpenAI's.

    Attributes:
        cache_salt: separates prompts that must not share cache (vLLM's).
        priority: lower numbers go first (vLLM's).
        ignore_eos: continue after the model's end-of-sequence token (vLLM's).
        min_tokens: tokens before which neither that token nor any of `stop` and `stop_token_ids`
            ends an answer (vLLM's).
        stop_token_ids: tokens that end an answer and are not part of its text (vLLM's).
        min_p: draw among tokens at least this many times as likely as the likeliest (vLLM's).
        repetition_penalty: divides positive logits of earlier tokens (vLLM's).
        response_format: text, any JSON object, or JSON that follows a schema.
        resume_at: in neither API: tokens of the prompt after which other prompts will differ; one
            position or several.
        prompt_logprobs: return the log-probability of each token of the prompt, and this many
            likeliest ones (vLLM's).
        kv_hints: vLLM's and SGLang's envelope of hints, see `kvgraft_retention.kv_hints`.
    """

    model: str
    max_tokens: PositiveInt | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[Annotated[StrictInt, Field(ge=0)]] = Field(default=[])
    n: int = Field(default=1, ge=1, le=16)
    seed: int | None = None
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=MOST_STOPS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: int = 0
    resume_at: list[Annotated[StrictInt, Field(ge=0)]] = Field(default=[])
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    kv_hints: dict[str, Any] | None = None

    @field_validator(
        *("temperature", "top_p", "top_k", "min_p", "n", "stream", "stop", "resume_at"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "priority"),
        *("min_tokens", "stop_token_ids"),
        mode="before",
    )
    @classmethod
    def _null_is_default(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("resume_at", mode="before")
    @classmethod
    def _one_position_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, int) else value

    @field_validator("kv_hints")
    @classmethod
    def _known_hints_are_possible(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            arguments_of(value)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("kv_hints: ")) from error
        return value

    @model_validator(mode="after")
    def _free_to_end_late(self) -> _Request:
        if self.min_tokens and self.schema_of_answer is not None:
            raise ValueError(
                "min_tokens with response_format: the schema says where an answer ends; leave one "
                "of them out"
            )
        return self

    @model_validator(mode="after")
    def _prompts_probabilities_in_one_piece(self) -> _Request:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError(
                "prompt_logprobs with stream=true: they are part of a whole answer; leave one of "
                "them out"
            )
        return self

    @property
    def n_prompt_logprobs(self) -> int | None:
        """Most likely tokens to find per position of the prompt; None for no log-probabilities."""
        return self.prompt_logprobs

    def sampling(self, index: int) -> Sampling:
        """The sampling of the answer with this number."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed is None else _seed_of(self.seed, index),
            logprobs=self.n_logprobs,
        )

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that answers follow; None for any text."""
        return None if self.response_format is None else self.response_format.schema_of_answer

    @property
    def n_logprobs(self) -> int | None:
        """Most likely tokens to return per position; None for no log-probabilities."""
        raise NotImplementedError

    @field_validator("stream_options")
    @classmethod
    def _only_with_a_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only with stream=true")
        return value


def _seed_of(seed: int, index: int) -> int:
    """The seed of one answer: the client's for the first, then different ones."""
    if index:
        mixed = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(mixed, "big")
    return seed % 2**63


class ResponseFormat(SettingsModel):
    """Text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_one_is_named(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("give json_schema with type json_schema, and only then")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that answers follow; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_of_answer
        return {"type": "object"} if self.type == "json_object" else None


class NamedSchema(SettingsModel):
    """A JSON schema; name, description and `strict` have no effect, since it is always enforced."""

    name: str
    description: str | None = None
    schema_of_answer: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class StreamOptions(SettingsModel):
    """Options of a stream.

    Attributes:
        include_usage: end with a chunk that holds the usage.
        continuous_usage_stats: every chunk holds it, too, as far as it goes (vLLM's).
        include_obfuscation: without effect.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class CompletionRequest(_Request):
    """`POST /v1/completions`.

    Attributes:
        prompt: one or several prompts, as text or as token ids.
        logprobs: return the log-probability of each token, and this many likeliest ones.
        echo: begin each answer with its prompt, and `logprobs` with those of the prompt's tokens.
        max_tokens: 0 with `echo` for the prompt alone.
    """

    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    echo: bool = False
    max_tokens: NonNegativeInt | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_of_four_forms(cls, value: object) -> object:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError(PROMPTS)
        for place, item in enumerate(value):
            if isinstance(item, Mapping):
                raise ValueError(
                    f"item {place} is an object, such as a part of a message; prompts are text, "
                    f"and images and audio are not served here; {PROMPTS}"
                )
            if _form(item) is None:
                raise ValueError(f"item {place} is {json.dumps(item)[:LONGEST_ECHO]}; {PROMPTS}")
            if _form(item) is not _form(value[0]):
                raise ValueError(f"item {place} is of another kind than item 0; {PROMPTS}")
        return value

    @field_validator("echo", mode="before")
    @classmethod
    def _no_echo_by_default(cls, value: object) -> object:
        return False if value is None else value

    @model_validator(mode="after")
    def _something_to_say(self) -> CompletionRequest:
        if self.max_tokens == 0 and (not self.echo or self.min_tokens):
            raise ValueError("max_tokens=0 without echo, or with min_tokens: give 1 or more")
        return self

    @property
    def n_logprobs(self) -> int | None:
        """As in `_Request`."""
        return self.logprobs

    @property
    def n_prompt_logprobs(self) -> int | None:
        """As in `_Request`; `echo` asks for as many as `logprobs`, unless a number is given."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


def _form(item: object) -> type | None:
    """The kind of prompt of a list's item; None if it is no prompt."""
    if isinstance(item, str):
        return str
    if type(item) is int:
        return int
    are_ids = isinstance(item, list) and all(type(each) is int for each in item)
    return list if are_ids else None


class Message(BaseModel):
    """One message of a conversation; `content` may be text parts."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_text_parts(cls, value: object) -> object:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("give text, or a list of parts of type 'text'")
        for place, part in enumerate(value):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(
                    f"part {place} is of type {kind!r}: {PARTS.get(kind, 'such parts')} are not "
                    "served here, where models read text alone; leave the part out"
                )
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"part {place} is no text; give parts such as {{'type': 'text', 'text': '...'}}"
                )
        return value

    @field_validator("tool_calls", "function_call", "audio")
    @classmethod
    def _only_text(cls, value: object, info: ValidationInfo) -> None:
        if value:
            raise ValueError(f"{info.field_name} is not served here; say it in the content")

    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class TextPart(BaseModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class ChatRequest(_Request):
    """`POST /v1/chat/completions`.

    Attributes:
        logprobs: return the log-probability of each token.
        top_logprobs: and this many likeliest ones.
        chat_template_kwargs: variables for the model's chat template (vLLM's).
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @field_validator("logprobs", "chat_template_kwargs", mode="before")
    @classmethod
    def _none_is_default(cls, value: object, info: ValidationInfo) -> object:
        return cls._null_is_default(value, info)

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("only with logprobs=true")
        return value

    @property
    def n_logprobs(self) -> int | None:
        """As in `_Request`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit_tokens(self) -> int | None:
        """Most tokens to produce, under either name."""
        return self.max_completion_tokens or self.max_tokens


for _model in (_Request, CompletionRequest, Message, ChatRequest):
    _model.model_rebuild()


def parse_completion(body: object) -> CompletionRequest:
    """A checked request; see `ApiError`."""
    parsed: CompletionRequest = _parse(CompletionRequest, body)
    return parsed


def parse_chat(body: object) -> ChatRequest:
    """A checked request; see `ApiError`."""
    parsed: ChatRequest = _parse(ChatRequest, body)
    return parsed


def _parse(model: type[Any], body: object) -> Any:
    """Validate; raises the first problem as an error that names the field."""
    if not isinstance(body, Mapping):
        raise ApiError("the body is no JSON object; send one with a model and a prompt")
    fields = {name: value for name, value in body.items() if name not in IGNORED}
    for name in list(fields):
        if name in UNSUPPORTED and name not in model.model_fields:
            value = fields.pop(name)
            if not any(value == allowed for allowed in UNSUPPORTED[name]):
                instead = INSTEAD.get(name, "leave it out")
                raise ApiError(
                    f"{name}={_echo(value)} is not served here; {instead}",
                    param=name,
                    code="unsupported_parameter",
                )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        # a misspelt name first: if the right one is required, it is also reported as missing
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise _refusal(first, model) from None


def _refusal(problem: ErrorDetails, model: type[BaseModel]) -> ApiError:
    """The API's error for a field that a model refused."""
    place = [str(part) for part in problem["loc"]]
    name = place[0] if place else "body"
    if problem["type"] == "extra_forbidden" and len(place) == 1:
        near = get_close_matches(name, model.model_fields, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        instead = f"; {INSTEAD[name]}" if name in INSTEAD else meant
        return ApiError(
            f"unrecognized request argument: {name}{instead}", param=name, code="unknown_parameter"
        )
    where = ".".join(place)
    if problem["type"] == "missing":
        return ApiError(f"missing required argument: {where}", param=name)
    told = wanted(problem)
    if problem["type"] in ("dict_type", "model_type", "model_attributes_type"):
        told = "give an object"
    return ApiError(f"{where}={_echo(problem['input'])}: {told}", param=where)


def _echo(value: object) -> str:
    """A wrong value, shortened."""
    given = repr(value)
    return given if len(given) <= LONGEST_ECHO else f"{given[:LONGEST_ECHO]}..."
