"""Lines of a batch's input: checked one by one, and the results that are written for them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any, Final

from diptych.runtime.errors import InvalidParameter
from gateway import limits
from gateway.request.json_values import parse_body

MAX_LINES: Final = 50_000
MAX_FAULTS: Final = 100
"""Faults of an input that are told; the rest would say the same."""
_MAX_ID_CHARS: Final = 512


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Request of a batch. ``number`` counts from 1, as editors do."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class BadLine(ValueError):
    """Line that is no request of its batch.

    Args:
        param: the member at fault, "" for the line as a whole.
    """

    def __init__(self, number: int, param: str, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.param = param

    def as_object(self) -> dict[str, Any]:
        """Return the fault as a batch's ``errors`` have it."""
        return {
            "code": "invalid_line",
            "line": self.number,
            "message": str(self),
            "param": self.param or None,
        }


def read_line(number: int, data: bytes, endpoints: Collection[str]) -> BatchLine:
    """Parse a line. Raises BadLine; the request in it is checked when it runs."""
    if len(data) > limits.MAX_BODY_BYTES:
        raise BadLine(number, "", f"must be at most {limits.MAX_BODY_BYTES} bytes")
    try:
        members = parse_body(data)
    except InvalidParameter as error:
        raise BadLine(number, "", error.violations[0].description) from None
    custom_id, url, body = members.get("custom_id"), members.get("url"), members.get("body")
    if not (isinstance(custom_id, str) and 0 < len(custom_id) <= _MAX_ID_CHARS):
        raise BadLine(number, "custom_id", f"must be a string of 1 to {_MAX_ID_CHARS} characters")
    if members.get("method") != "POST":
        raise BadLine(number, "method", "must be POST")
    if not isinstance(url, str) or url not in endpoints:
        raise BadLine(number, "url", f"must be {' or '.join(endpoints)}")
    if not isinstance(body, dict):
        raise BadLine(number, "body", "must be an object")
    return BatchLine(number, custom_id, url, body)


def answered(line: BatchLine, status: int, request_id: str, body: str) -> bytes:
    """Return the line of a result. ``body`` is JSON without line breaks."""
    head = json.dumps({"id": f"batch_req_{line.number}", "custom_id": line.custom_id})[:-1]
    response = json.dumps({"status_code": status, "request_id": request_id})[:-1]
    return f'{head}, "response": {response}, "body": {body}}}, "error": null}}\n'.encode()


def not_run(line: BatchLine, code: str, message: str) -> bytes:
    """Return the line of a request that was not run."""
    told = {
        "id": f"batch_req_{line.number}",
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return f"{json.dumps(told)}\n".encode()


def custom_id_of(result: bytes) -> str:
    """Return the id of a line that `answered` or `not_run` made. Raises ValueError for another."""
    found = json.loads(result)
    if not (isinstance(found, dict) and isinstance(found.get("custom_id"), str)):
        raise ValueError("no custom_id")
    return str(found["custom_id"])


def whole_results(file: IO[bytes]) -> tuple[set[str], int]:
    """Return the ids of the results in a file, and the bytes that they take: a last one may be cut.

    Raises ValueError for lines that are no results.
    """
    found, size = set[str](), 0
    for result in file:
        if not result.endswith(b"\n"):
            break
        found.add(custom_id_of(result))
        size += len(result)
    return found, size
