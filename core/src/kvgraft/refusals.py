"""One-line errors for a setting or option: its name, its value and the values it takes.

    page_size=0: give more than 0
    device_tokens is missing; give for example '4M'
    no setting 'device_token'; did you mean 'device_tokens'? settings: components, page_size, ...

pydantic finds the error; its wording and its links are for programmers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

__all__ = [
    "SettingsModel",
    "checked",
    "closest",
    "first_refusal",
    "of_type",
    "other_names",
    "shown",
    "wanted",
]

Settings = TypeVar("Settings", bound=BaseModel)

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60

INTEGER = ("int_type", "int_parsing", "int_from_float")
FLOAT = ("float_type", "float_parsing")
OPTIONS = ("dict_type", "model_type", "model_attributes_type")

WANTED = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "finite_number": "a number that is finite",
    "string_type": "text",
    "string_pattern_mismatch": "text that matches {pattern}",
    "path_not_file": "a file that is there",
    "path_not_directory": "a directory that is there",
    "string_too_short": "text of {min_length} or more characters",
    "too_long": "{max_length} or fewer",
    "too_short": "{min_length} or more",
    "int_parsing_size": "a smaller number",
    **dict.fromkeys(INTEGER, "a whole number"),
    **dict.fromkeys(FLOAT, "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("enum", "literal_error"), "{expected}"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type"), "a list"),
    **dict.fromkeys(OPTIONS, "options by name"),
}
"""The value to give instead, by pydantic's type of error; its context fills in the names."""

OF_A_TYPE = frozenset({"string_type", *INTEGER, *FLOAT, *OPTIONS})
"""Errors after which an example helps."""

CLOSE = 0.65
"""Similarity from which on another name may have been meant; `window` is no `kind`."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("block_size", "kv_block_size", "page_tokens"), ("page_size", "block_tokens")),
    **dict.fromkeys(("num_gpu_blocks", "num_gpu_blocks_override"), ("device_tokens",)),
    **dict.fromkeys(("max_total_tokens", "max_total_num_tokens"), ("device_tokens",)),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), ("device_memory",)),
    **dict.fromkeys(("kv_cache_memory", "kv_cache_memory_bytes"), ("device_memory",)),
    **dict.fromkeys(("num_cpu_blocks", "hicache_ratio"), ("host_tokens",)),
    **dict.fromkeys(("swap_space", "kv_offloading_size", "hicache_size"), ("host_memory",)),
    **dict.fromkeys(("swa_full_tokens_ratio", "mamba_full_memory_ratio"), ("device_memory",)),
    **dict.fromkeys(("hicache_storage_backend", "kv_transfer_config"), ("storage",)),
    **dict.fromkeys(("eviction_policy", "radix_eviction_policy"), ("policy",)),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), ("max_requests", "max_running")),
    **dict.fromkeys(("max_model_len", "context_length"), ("max_tokens",)),
    "max_num_batched_tokens": ("step_tokens",),
    **dict.fromkeys(("chunked_prefill_size", "long_prefill_token_threshold"), ("chunk_tokens",)),
    **dict.fromkeys(("kv_cache_dtype", "cache_dtype"), ("dtype",)),
    "num_hidden_layers": ("n_layers",),
    **dict.fromkeys(("num_speculative_tokens", "speculative_num_draft_tokens"), ("max_drafts",)),
    **dict.fromkeys(("mamba_block_size", "mamba_cache_mode"), ("decode_interval_tokens",)),
}
"""Settings, options and command-line options, by their names in vLLM and SGLang."""

VALUES = {
    **dict.fromkeys(("num_gpu_blocks", "num_gpu_blocks_override"), "number of blocks * block_size"),
    "num_cpu_blocks": "number of blocks * block_size",
    "hicache_ratio": "ratio * device_tokens",
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "bytes, such as 40GB"),
}
"""How to convert the value, where it differs."""


class SettingsModel(BaseModel):
    """Settings that refuse names they do not know, and true and false for a number."""

    elsewhere: ClassVar[Mapping[str, str]] = {}  # by their names in other engines, as `ELSEWHERE`
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name in cls.model_fields:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            for kind in (int, float) if bool not in kinds else ():
                if kind in kinds:
                    raise PydanticCustomError(
                        f"{kind.__name__}_type", "true and false are no numbers"
                    )
        return value


def _kinds(annotation: object) -> set[object]:
    """An annotation and all those inside it."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))


def checked(model: type[Settings], given: object, *place: str) -> Settings:
    """Settings inside others whose model does not know theirs; for a pydantic validator.

    Args:
        model: of these settings.
        given: them, or a dictionary.
        place: the names of the settings around them.
    """
    if isinstance(given, model):
        return given
    try:
        return model.model_validate(given)
    except ValidationError as error:
        said = first_refusal(error, model, "setting", place)
        raise PydanticCustomError("inside", "{said}", {"said": said}) from error


def first_refusal(
    error: ValidationError, model: type[BaseModel], noun: str, inside: Sequence[str] = ()
) -> str:
    """One line about the first thing that is wrong.

    A misspelt name comes first: where the right one is required, it shows as missing as well.

    Args:
        error: raised for `model`.
        model: the model that refused the fields.
        noun: the word for a field: "setting" or "option".
        inside: the names of the fields around the model's.
    """
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    place = [*inside, *map(str, first["loc"])]
    if not place or first["type"] == "inside":
        return _plain(first)
    fields = _fields_around(model, place[len(inside) :])
    if first["type"] == "extra_forbidden":
        return _unknown(place, fields, noun, getattr(model, "elsewhere", {}))
    field = fields.get(place[-1])
    name = f"{noun} {'.'.join(place)}"
    if first["type"] == "missing":
        return f"{name} is missing; give {_example(field, 'for example ') or 'it'}"
    value = shown(first["input"])
    if first["type"] == "size":
        return f"{name}={value} {first['msg']}"
    example = _example(field, ", such as ") if first["type"] in OF_A_TYPE else ""
    return f"{name}={value}: {wanted(first)}{example}"


def wanted(problem: ErrorDetails) -> str:
    """The advice: "give 0 or more"; the model's own words where it has some."""
    known = WANTED.get(problem["type"])
    if known is None:
        return _plain(problem)
    bounds = {key: _short(each) for key, each in problem.get("ctx", {}).items()}
    return f"give {known.format(**bounds)}"


def other_names(
    name: str, known: Collection[str], written: Callable[[str], str] = repr
) -> list[str]:
    """Our names for a name of vLLM or SGLang, and how to convert the value.

    Args:
        name: as there.
        known: our names.
        written: puts a name into a message.
    """
    value = f" (= {VALUES[name]})" if name in VALUES else ""
    return [written(each) + value for each in ELSEWHERE.get(name, ()) if each in known]


def of_type(value: object) -> str:
    """An object in a message, by its type: "an int", "a str", or "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def shown(value: object) -> str:
    """A value in a message; a long one is cut."""
    return " ".join(_SHORT.repr(value).split())


def closest(name: str, known: Collection[str]) -> str:
    """The question " did you mean 'window'?", or nothing if no known name is similar."""
    near = get_close_matches(name, known, n=1, cutoff=CLOSE)
    return f" did you mean {near[0]!r}?" if near else ""


def _unknown(
    place: list[str], known: Collection[str], noun: str, elsewhere: Mapping[str, str]
) -> str:
    name = place[-1]
    near = [repr(elsewhere[name])] if name in elsewhere else other_names(name, known)
    meant = f" did you mean {' or '.join(near)}?" if near else closest(name, known)
    return f"no {noun} {'.'.join(place)!r};{meant} {noun}s: {', '.join(known) or 'none'}"


def _fields_around(model: type[BaseModel], place: list[str]) -> Mapping[str, FieldInfo]:
    """The fields of the model, inside others, to which the last part of a place belongs."""
    fields: Mapping[str, FieldInfo] = model.model_fields
    for part in place[:-1]:
        if part not in fields:
            continue  # the name of one member of a union
        annotation = fields[part].annotation
        kinds = (annotation, *get_args(annotation))
        inner = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)]
        fields = inner[0].model_fields if inner else {}
    return fields


def _example(field: FieldInfo | None, before: str) -> str:
    """A value that would do, if the field says one: an example of it, or its default."""
    if field is None:
        return ""
    if field.examples:
        return f"{before}{field.examples[0]!r}"
    return f"{before}{field.default!r}" if isinstance(field.default, (str, int, float)) else ""


def _short(bound: object) -> object:
    """`1` for `1.0`."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _plain(problem: ErrorDetails) -> str:
    """The model's own words, or pydantic's where there is nothing better."""
    said = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return said.replace("Input should be ", "give ")
