"""Types of the gateway's settings: texts and files whose content is checked when they are given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, Field

from diptych.runtime.tls import require_readable
from gateway.access.access_log import check_path
from gateway.access.key_file import read_key_file
from gateway.adapters.adapter import parse_lora
from gateway.images.url_rules import UrlRules
from gateway.model.aliases import parse_aliases
from gateway.model.named_models import parse_models
from gateway.model.small_requests import parse_small_requests
from gateway.model.template_file import read_template

Value = TypeVar("Value")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def listed(text: str) -> tuple[str, ...]:
    """Return the items of a list that is separated by commas or blanks."""
    return tuple(text.replace(",", " ").split())


def _checked(read: Callable[[Value], object]) -> AfterValidator:
    """Return a rule that keeps a value which `read` takes; its ValueError says what is wrong."""

    def check(value: Value) -> Value:
        read(value)
        return value

    return AfterValidator(check)


def _check_origins(value: str) -> None:
    for origin in listed(value):
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ValueError("must be * or origins such as https://example.org, without a path")


def _check_server(value: str) -> None:
    if not (_ORIGIN.match(value) and value.startswith(("http://", "https://"))):
        raise ValueError("must be an http or https URL, such as https://api.example.org/v1")


def _check_adapters(value: str) -> None:
    for one in filter(None, value.split(",")):
        parse_lora(one)


def _check_image_hosts(value: str) -> None:
    UrlRules(listed(value))


Models = Annotated[str, Field(min_length=1), _checked(parse_models)]
Adapters = Annotated[str, _checked(_check_adapters)]
ModelSplit = Annotated[str, _checked(parse_aliases)]
SmallRequests = Annotated[str, _checked(parse_small_requests)]
Origins = Annotated[str, _checked(_check_origins)]
ServerUrl = Annotated[str, _checked(_check_server)]
ImageHosts = Annotated[str, _checked(_check_image_hosts)]
KeyFile = Annotated[Path, _checked(read_key_file)]
LogPath = Annotated[str, _checked(check_path)]
TemplateFile = Annotated[Path, _checked(read_template)]
ReadableFile = Annotated[Path, _checked(require_readable)]
