"""Body of ``POST /v1/batches``."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from gateway.frontends.openai.body_model import BodyModel, Text, absent, rule

_WINDOW: Final = "24h"
_MAX_METADATA: Final = 16


def _window(value: str) -> str:
    if value != _WINDOW:
        raise rule(f"must be {_WINDOW}")
    return value


def _bounded(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MAX_METADATA or any(len(name) > 64 or len(text) > 512 for name, text in value.items()):
        raise rule(f"must have at most {_MAX_METADATA} entries of at most 64 and 512 characters")
    return value


class BatchBody(BodyModel):
    """Batch of the requests in a file."""

    input_file_id: Text
    endpoint: Text = Field(description="Path that every line names.")
    completion_window: Annotated[Text, AfterValidator(_window)] = _WINDOW
    metadata: Annotated[dict[str, Text], AfterValidator(_bounded)] | None = None
    output_expires_after: Annotated[Any, absent()] = None
