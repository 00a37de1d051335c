"""Pydantic models of JSON bodies: their base, their types, and their errors.

null is the same as absent, as OpenAI's own clients send it. Errors name the member as the client wrote it
(``messages[0].content``) and never hold its value. Ranges are checked later, by `gateway.request`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from diptych.parameters import UINT32, Parameter, Texts, TokenBiases, TokenIds
from diptych.runtime.errors import DiptychError, InvalidParameter, UnsupportedFeature, printable
from gateway import limits
from gateway.request.json_values import BODY, array, integer, number, string, token_ids, whole

M = TypeVar("M", bound=BaseModel)
_UNSUPPORTED: Final = "unsupported"
_RULE: Final = "rule"


class BodyModel(BaseModel):
    """JSON object whose members are all known, and of exactly the type that they are declared with."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class OpenModel(BaseModel):
    """JSON object whose unknown members are ignored: clients keep notes of their own in history and tools."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


def validate_members(model: type[M], members: dict[str, Any]) -> M:
    """Return the members as a model. Unknown ones that are null are taken out of `members`.

    Raises InvalidParameter or UnsupportedFeature with the client's name of the member.
    """
    try:
        return model.model_validate(members)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=True)
    for fault in faults:
        if fault["type"] != "extra_forbidden" or fault["input"] is not None:
            raise _refusal(fault)
    for fault in faults:
        holder: Any = members
        for step in fault["loc"][:-1]:
            holder = holder if _is_tag(step) else holder[step]
        del holder[fault["loc"][-1]]
    return validate_members(model, members)


def tagged(kind: str) -> str:
    """Return the tag of a union's branch: a step of pydantic's paths that is no member."""
    return f"<{kind}>"


_TAGS: Final[Mapping[type, str]] = {str: tagged("text"), list: tagged("list"), dict: tagged("object")}


def _is_tag(step: int | str) -> bool:
    return isinstance(step, str) and step.startswith("<")


def _refusal(fault: ErrorDetails) -> DiptychError:
    kind, context = fault["type"], fault.get("ctx", {})
    steps = [
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"] if not _is_tag(step)
    ]
    path = printable("".join(steps).removeprefix(".") or BODY)
    if kind == _UNSUPPORTED:
        words = str(context["words"])
        return UnsupportedFeature(path, words) if words else UnsupportedFeature(path)
    if kind == "missing" or (fault["input"] is None and kind != "extra_forbidden"):
        return InvalidParameter(path, "is required")
    if kind == _RULE:
        return InvalidParameter(path, fault["msg"])
    if kind == "too_long":
        return InvalidParameter(path, f"must have at most {context['max_length']} elements")
    return InvalidParameter(path, _WORDS.get(kind, "is not valid"))


_WORDS: Final[Mapping[str, str]] = {
    "extra_forbidden": "is not a field that this server knows",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def rule(words: str) -> PydanticCustomError:
    """Make the error of a validator that breaks a rule: "must be …"."""
    return PydanticCustomError(_RULE, "{words}", {"words": words})


def unsupported(words: str = "") -> PydanticCustomError:
    """Make the error of a validator for what this server does not implement."""
    return PydanticCustomError(_UNSUPPORTED, "unsupported", {"words": words})


def unicode_text(value: str) -> str:
    """Return `value`. Raises the error of a validator for half of a surrogate pair."""
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # JSON may escape half of a surrogate pair
            raise rule("must be valid Unicode") from None
    return value


def within(held: tuple[int, int], allowed: tuple[int, int] | None = None, note: str = "") -> AfterValidator:
    """Make the validator of an integer that a wire field must hold.

    Args:
        held: what the field holds; others are refused here.
        allowed: the range to name then, if it is another. The core checks it.
        note: of the range.
    """
    low, high = allowed or held

    def check(value: int) -> int:
        if not held[0] <= value <= held[1]:
            raise rule(f"must be from {low} to {high}{note}")
        return value

    return AfterValidator(check)


Text = Annotated[str, AfterValidator(unicode_text)]


def count_of(row: Parameter, note: str = "") -> AfterValidator:
    """Make the validator of a count whose row in the table of parameters has a reader of its own."""
    return within(UINT32, row.integers, note)


Raw = dict[Any, Any]
"""Object whose members are read later or elsewhere, such as a JSON schema."""


def absent(*harmless: object) -> PlainValidator:
    """Make the validator of a member that is not implemented; values that ask for nothing pass."""

    def check(value: object) -> None:
        flag = isinstance(value, bool)
        if value is not None and not any(value == one and flag is isinstance(one, bool) for one in harmless):
            raise unsupported()

    return PlainValidator(check)


def at_most(elements: int) -> Any:
    """Make the bound of a list; its first fault is the only one."""
    return Field(max_length=elements, fail_fast=True)


def either(words: str) -> Discriminator:
    """Make the discriminator of a union by JSON type, with the error for a value of no branch."""
    return Discriminator(
        lambda value: _TAGS.get(type(value)),
        custom_error_type=_RULE,
        custom_error_message=words,
    )


TextOrParts = Annotated[
    Annotated[Text, Tag(tagged("text"))]
    | Annotated[list[M], at_most(limits.MAX_JSON_LIST), Tag(tagged("list"))],
    either("must be a string or an array of parts"),
]
"""Content of a turn, whose parts are of a model."""
TextOrObject = Annotated[
    Annotated[Text, Tag(tagged("text"))] | Annotated[M, Tag(tagged("object"))],
    either("must be a string or an object"),
]
"""Word, or an object of a model that says more."""


def parameter_fields(rows: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the fields of a model for rows of the table of parameters, by their members."""
    return {name: (Annotated[_type_of(name, row), _schema(row)], None) for name, row in rows.items()}


def _type_of(name: str, row: Parameter) -> Any:
    if row.type is int:
        bounds = (-row.fits[1], row.fits[1]) if row.inverted else row.fits
        allowed = None if row.inverted else row.integers
        return Annotated[int, within(bounds, allowed), BeforeValidator(whole)] | None
    if row.type in _OWN:
        read = _OWN[row.type]
        return Annotated[Any, PlainValidator(lambda value: None if value is None else read(name, value, row))]
    return {float: float, bool: bool, str: Text}[row.type] | None


def _schema(row: Parameter) -> WithJsonSchema:
    made: dict[str, Any] = {"description": row.about, **_JSON_TYPES[row.type]}
    ends = {"minimum": row.low, "exclusiveMinimum": row.above, "maximum": row.high}
    if row.type in (int, float):
        made |= {name: end for name, end in ends.items() if end is not None}
    if row.type is TokenIds:
        made["maxItems"] = row.most
    return WithJsonSchema(made)


_JSON_TYPES: Final[Mapping[object, dict[str, Any]]] = {
    float: {"type": "number"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    Texts: {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    TokenIds: {"type": "array", "items": {"type": "integer", "minimum": 0}},
    TokenBiases: {"type": "object", "additionalProperties": {"type": "number"}},
}


def _texts(name: str, value: object, row: Parameter) -> list[str]:
    if isinstance(value, str):
        return [string(name, value)]
    if not isinstance(value, list):
        raise InvalidParameter(name, "must be a string or an array of strings")
    return [string(f"{name}[{index}]", text) for index, text in enumerate(array(name, value, row.most))]


def _biases(name: str, value: object, row: Parameter) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    if len(value) > row.most:
        raise InvalidParameter(name, f"must have at most {row.most} entries")
    return {_token_id(name, key): number(name, bias) for key, bias in value.items()}


def _token_id(name: str, key: str) -> int:
    """Read a key of ``logit_bias``: JSON has strings only."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise InvalidParameter(name, "must have token ids as keys")
    return integer(name, int(key), UINT32)


# Lists may be long: they are checked as a whole, and not element by element in a model.
_OWN: Final[Mapping[object, Callable[[str, object, Parameter], Any]]] = {
    Texts: _texts,
    TokenIds: lambda name, value, row: token_ids(name, array(name, value, row.most)),
    TokenBiases: _biases,
}
