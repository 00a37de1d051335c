"""Roles that a chat template renders, found by rendering probes.

Many templates have no branch for some role, or look at a system turn only where it comes first: the turn
vanishes, and the model answers as if it had not been there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.model.chat_template import ChatTemplate, Message, RenderRefused
from gateway.tools.tool import Tool

# A template pastes the role between control tokens, so a free role would be a way to write there.
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_ANYWHERE: Final = frozenset(ROLES)
# Words that occur in no template.
_PROBE: Final = "probeturn"
_BEFORE: Final = "probebefore"
_QUESTION: Final = Message("user", "probeuser")
_ANSWER: Final = Message("assistant", "Hello")


@dataclass(frozen=True, slots=True)
class RoleSupport:
    """Roles that a template renders, by the place of a turn. The default is for models without a template."""

    first: frozenset[str] = _ANYWHERE  # the first turn
    second: frozenset[str] = _ANYWHERE  # after turns of the system or the developer only
    later: frozenset[str] = _ANYWHERE

    @classmethod
    def of(cls, template: ChatTemplate, tools: Sequence[Tool] = ()) -> RoleSupport:
        """Probe ``template`` with small renderings, with ``tools`` if there are any."""
        if _QUESTION.content not in rendered(template, [_QUESTION], tools):
            return cls()  # it wants something that the probes do not have, and refuses by itself
        system = Message("system", _BEFORE)

        def renders(role: str, *before: Message) -> bool:
            text = rendered(template, [*before, Message(role, _PROBE), _QUESTION], tools)
            return _PROBE in text and (system not in before or _BEFORE in text)

        others = _ANYWHERE - {"system", "developer"}
        first = {role for role in ("system", "developer") if renders(role)}
        leading = (system,) if "system" in first else ()
        second = {role for role in ("system", "developer") if renders(role, system)}
        later = {role for role in ("system", "developer") if renders(role, *leading, _QUESTION, _ANSWER)}
        conversation = [_QUESTION, Message("assistant", _PROBE), _QUESTION]
        if _PROBE not in rendered(template, conversation, tools):
            others -= {"assistant"}
        return cls(others | first, others | second, others | later)

    def rendered_role(self, role: str, index: int, *, leading: bool) -> str | None:
        """Return the role to render a turn with; None: there is none.

        A developer's turn becomes the system's where it would vanish.

        Args:
            role: of the turn.
            index: of the turn in the conversation.
            leading: the turns before it, if any, are the system's or the developer's.
        """
        roles = self.first if index == 0 else self.second if leading else self.later
        if role in roles:
            return role
        return "system" if role == "developer" and "system" in roles else None


def rendered(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Return the text of a rendering, "" if the template refuses."""
    try:
        parts = template.render(messages, add_generation_prompt=True, tools=tools)
    except RenderRefused:
        return ""
    return "".join(part if isinstance(part, str) else part.text for part in parts)
