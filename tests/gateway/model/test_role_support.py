"""Roles found by probing templates: those that vanish are replaced or refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diptych.runtime.errors import UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway.model.chat_template import ChatTemplate
from gateway.model.role_support import RoleSupport
from gateway.model.served_model import ServedModel
from gateway.request.validate_prompt import chat_parts

QWEN = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or m.role == 'system' %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
"""As Qwen 2.5's: no branch for developers."""
FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def served(bundled: ServedModel, source: str) -> ServedModel:
    template = ChatTemplate(source, bundled.tokenizer.control_tokens, {})
    roles = RoleSupport.of(template)
    return dataclasses.replace(bundled, chat_template=template, roles=roles, roles_beside_tools=roles)


def rendered(model: ServedModel, *roles: str) -> str:
    turns: Any = [pb.ChatMessage(role=role, content=f"c{at}") for at, role in enumerate(roles)]
    parts = chat_parts(pb.ChatPrompt(messages=turns), model, None)
    return "".join(part if isinstance(part, str) else part.text for part in parts)


@pytest.mark.parametrize(
    ("source", "roles", "expected"),
    [
        (QWEN, ("developer", "user"), "<system>c0<user>c1"),
        (QWEN, ("system", "developer", "user"), "<system>c0<system>c1<user>c2"),
        (QWEN, ("user", "assistant", "developer", "user"), "<user>c0<assistant>c1<system>c2<user>c3"),
        (FIRST_ONLY, ("developer", "user"), "<system>c0<user>c1"),
        (ANY, ("developer", "user", "system"), "<developer>c0<user>c1<system>c2"),
        (GEMMA, ("user", "assistant", "user"), "<user>c0<assistant>c1<user>c2"),
    ],
)
def test_every_turn_is_rendered(
    bundled: ServedModel, source: str, roles: tuple[str, ...], expected: str
) -> None:
    assert rendered(served(bundled, source), *roles) == expected


@pytest.mark.parametrize(
    ("source", "roles", "index"),
    [
        (FIRST_ONLY, ("system", "system", "user"), 1),
        (FIRST_ONLY, ("system", "developer", "user"), 1),
        (FIRST_ONLY, ("user", "assistant", "system", "user"), 2),
        (GEMMA, ("system", "user"), 0),
        (GEMMA, ("developer", "user"), 0),
        (QWEN.replace("'user', 'assistant'", "'user',"), ("user", "assistant", "user"), 1),
    ],
)
def test_a_turn_that_would_vanish_is_refused_by_its_role(
    bundled: ServedModel, source: str, roles: tuple[str, ...], index: int
) -> None:
    with pytest.raises(UnsupportedFeature) as refused:
        rendered(served(bundled, source), *roles)
    (violation,) = refused.value.violations
    assert violation.field == f"chat.messages[{index}].role"


def test_a_template_that_refuses_the_probes_refuses_by_itself(bundled: ServedModel) -> None:
    template = ChatTemplate("{{ raise_exception('no') }}", bundled.tokenizer.control_tokens, {})
    assert RoleSupport.of(template) == RoleSupport()
