"""Checks of single fields: ranges, ids, names and labels that callers choose."""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Final

from diptych.parameters import PARAMETERS, Parameter
from diptych.runtime.errors import InvalidParameter, UnknownModel
from gateway import limits
from gateway.model.served_model import ModelCard

MAX_REQUEST_ID_CHARS: Final = PARAMETERS["request_id"].longest
_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_REQUEST_ID_CHARS}}}")
_NOT_IN_IDS: Final = re.compile(r"[^A-Za-z0-9._-]")
_REQUEST_ID_RULE: Final = f"must be 1 to {MAX_REQUEST_ID_CHARS} characters of [A-Za-z0-9._-]"
# C0, DEL and C1: they forge log lines and header values.
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def read_number(parameter: Parameter, message: Any) -> Any:
    """Return the value of an optional number of `message`, which holds the parameter's field; None if absent.

    Raises InvalidParameter for one out of its range.
    """
    if not message.HasField(parameter.wire_field):
        return None
    value = getattr(message, parameter.wire_field)
    check_range(parameter, value)
    return value


def check_range(parameter: Parameter, value: float) -> None:
    """Raise InvalidParameter for a value out of the parameter's range."""
    if not parameter.allows(value):
        raise InvalidParameter(parameter.wire, f"must be {parameter.rule}")


def check_texts(parameter: Parameter, texts: Sequence[str], noun: str) -> None:
    """Raise InvalidParameter for too many texts, or for one that is too long."""
    if len(texts) > parameter.most:
        raise InvalidParameter(parameter.wire, f"must have at most {parameter.most} {noun}")
    for index, text in enumerate(texts):
        # Characters first: a megabyte need not be encoded to be too long.
        if len(text) > parameter.longest or len(text.encode("utf-8")) > parameter.longest:
            raise InvalidParameter(f"{parameter.wire}[{index}]", f"must be at most {parameter.longest} bytes")


def distinct_token_ids(parameter: Parameter, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids without repetitions, in their order. Raises InvalidParameter."""
    if len(token_ids) > parameter.most:
        raise InvalidParameter(parameter.wire, f"must have at most {parameter.most} ids")
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            path = f"{parameter.wire}[{index}]"
            raise InvalidParameter(path, f"must be below the vocabulary size {vocab_size}")
    return tuple(dict.fromkeys(token_ids))


def request_id(value: str, header: str, fresh: Callable[[], str]) -> str:
    """Return the field, else the id that `id_from_header` made of the header, else a fresh one."""
    return existing_request_id(value) if value else header or fresh()


def id_from_header(header: str, taken: Callable[[str], bool]) -> str:
    """Return the id of a request with this x-request-id header, "" without one.

    ``taken`` returns whether a live request has an id. Proxies and frameworks set the header, in forms of
    their own and the same one for all that one action of a user caused. It is for finding requests again, and
    no reason to refuse them.
    """
    name = _NOT_IN_IDS.sub("_", header[:MAX_REQUEST_ID_CHARS])
    if not name or not taken(name):
        return name
    end = f"-{secrets.token_hex(4)}"
    return name[: MAX_REQUEST_ID_CHARS - len(end)] + end


def existing_request_id(value: str) -> str:
    """Check an id that a client chose: of its request, or in CancelRequest. Raises InvalidParameter."""
    if _REQUEST_ID.fullmatch(value) is None:
        raise InvalidParameter("request_id", _REQUEST_ID_RULE)
    return value


def model_name(value: str, card: ModelCard) -> str:
    """Return the served name that ``value`` stands for. Any other name is unknown, a path as well."""
    if not value:
        raise InvalidParameter("model", "is required")
    if not card.answers_to(value):
        raise UnknownModel(value, card.name)
    return card.name


def has_name_characters(value: str) -> bool:
    """Return whether all is letters and digits of any script, their marks, dots, dashes or underscores.

    Nothing of these spells a control token.
    """
    return all(char in "._-" or unicodedata.category(char)[0] in "LMN" for char in value)


def message_name(field: str, value: str) -> str:
    """Check the name of a chat message. Raises InvalidParameter."""
    most = limits.MAX_MESSAGE_NAME_CHARS
    if len(value) > most or not has_name_characters(value):
        raise InvalidParameter(field, f"must be at most {most} letters, digits, dots, dashes and underscores")
    return value


def label(parameter: Parameter, value: str) -> str:
    """Check free text that names something (a salt, a session): short and without control characters."""
    # Characters first: a megabyte need not be encoded to be too long.
    if len(value) > parameter.longest or len(value.encode("utf-8")) > parameter.longest:
        raise InvalidParameter(parameter.wire, f"must be at most {parameter.longest} bytes")
    if _CONTROL_CHARACTER.search(value):
        raise InvalidParameter(parameter.wire, "must not hold control characters")
    return value
