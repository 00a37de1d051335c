"""Checks of ids, names and labels: what callers choose to call things."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Final

from diptych.runtime.errors import InvalidParameter, UnknownModel
from gateway import limits
from gateway.model.served_model import ModelCard

_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.MAX_REQUEST_ID_CHARS}}}")
_NOT_IN_IDS: Final = re.compile(r"[^A-Za-z0-9._-]")
_MESSAGE_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.MAX_MESSAGE_NAME_CHARS}}}")
_REQUEST_ID_RULE: Final = f"must be 1 to {limits.MAX_REQUEST_ID_CHARS} characters of [A-Za-z0-9._-]"
# C0, DEL and C1: they forge log lines and header values.
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def request_id(value: str, header: str, fresh: Callable[[], str]) -> str:
    """The field, else the id that `id_from_header` made of the x-request-id header, else a fresh one."""
    return existing_request_id(value) if value else header or fresh()


def id_from_header(header: str, taken: Callable[[str], bool]) -> str:
    """The id of a request with this x-request-id header, "" without one.

    ``taken`` tells whether a live request has an id. Proxies and frameworks set the header, in forms of their
    own and the same one for all that one action of a user caused. It is for finding things again, and no
    reason to refuse them.
    """
    name = _NOT_IN_IDS.sub("_", header[: limits.MAX_REQUEST_ID_CHARS])
    if not name or not taken(name):
        return name
    end = f"-{secrets.token_hex(4)}"
    return name[: limits.MAX_REQUEST_ID_CHARS - len(end)] + end


def existing_request_id(value: str) -> str:
    """An id as a client chose it: of its request, or in CancelRequest."""
    if _REQUEST_ID.fullmatch(value) is None:
        raise InvalidParameter("request_id", _REQUEST_ID_RULE)
    return value


def model_name(value: str, card: ModelCard) -> str:
    """The served name that ``value`` stands for. Any other name is unknown, a path as well."""
    if not value:
        raise InvalidParameter("model", "is required")
    if not card.answers_to(value):
        raise UnknownModel(value, card.name)
    return card.name


def message_name(field: str, value: str) -> str:
    if value and _MESSAGE_NAME.fullmatch(value) is None:
        raise InvalidParameter(
            field, f"must be at most {limits.MAX_MESSAGE_NAME_CHARS} characters of [A-Za-z0-9._-]"
        )
    return value


def label(field: str, value: str, max_bytes: int) -> str:
    """Free text that names something (a salt, a session): short and without control characters."""
    # Characters first: a megabyte need not be encoded to be too long.
    if len(value) > max_bytes or len(value.encode("utf-8")) > max_bytes:
        raise InvalidParameter(field, f"must be at most {max_bytes} bytes")
    if _CONTROL_CHARACTER.search(value):
        raise InvalidParameter(field, "must not hold control characters")
    return value
