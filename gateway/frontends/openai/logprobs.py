"""Log-probabilities of tokens in OpenAI's two shapes, and the offsets of tokens in a text.

Completions have parallel lists, chats have records. A token that is no whole UTF-8 is called
``bytes:\\xe2\\x96``, as OpenAI calls it: its replacement character would be the name of many tokens at once.

A byte-level token may begin or end within a character, so that the characters of a text are not those of its
tokens one by one: for ``text_offset`` their bytes are read as one text, as it is shown. Tokens that it does
not show take none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from diptych.v1 import inference_pb2 as pb
from gateway.cooperative_yield import Yielder, slices
from gateway.frontends.openai.answer import inside, joined
from gateway.output.detokenizer import Utf8Text


class TextOffsets:
    """Count of characters while tokens come.

    Args:
        text: where it begins (see `gateway.output.detokenizer.text_after`).
        hidden: whether the text does not show a token; None = it shows all.
    """

    def __init__(self, text: Utf8Text | None = None, hidden: Callable[[int], bool] | None = None) -> None:
        self._text = text or Utf8Text()
        self._hidden = hidden
        self._characters = 0

    def take(self, token_id: int, data: bytes) -> int:
        """Count characters before this token; one that begins within a character begins where that does."""
        offset = self._characters
        if self._hidden is None or not self._hidden(token_id):
            self._characters += len(self._text.push(data))
        return offset

    def go_on(self, text: Utf8Text, hidden: Callable[[int], bool] | None = None) -> None:
        """Begin an output behind its prompt. Arguments as at the beginning."""
        self._text, self._hidden = text, hidden

    def copy(self) -> TextOffsets:
        """Return a copy, for a text that goes on in several ways."""
        same = TextOffsets(self._text.copy(), self._hidden)
        same._characters = self._characters
        return same


_LOWEST: Final = -9999.0  # JSON has no infinity


LISTS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_SLICE: Final = 64  # tokens, with up to 20 others each


async def completion_lists(
    items: Sequence[pb.TokenLogprob], offsets: TextOffsets, turns: Yielder
) -> list[str]:
    """Return `completion_logprobs` as JSON: the inside of each of the `LISTS`."""
    parts: list[list[str]] = [[] for _ in LISTS]
    for some in slices(items, _SLICE):
        found = completion_logprobs(some, offsets)
        for part, name in zip(parts, LISTS, strict=True):
            part.append(inside(found[name]))
        await turns.done(_count(some))
    return [joined(part) for part in parts]


async def chat_logprobs_json(items: Sequence[pb.TokenLogprob], turns: Yielder) -> str:
    parts = []
    for some in slices(items, _SLICE):
        parts.append(inside(chat_logprobs(some)["content"]))
        await turns.done(_count(some))
    return f'{{"content":[{joined(parts)}],"refusal":null}}'


def completion_logprobs(items: Sequence[pb.TokenLogprob], offsets: TextOffsets) -> dict[str, Any]:
    """Return the logprobs of tokens as parallel lists.

    Args:
        items: of consecutive tokens.
        offsets: at the first of them; after the last one when this returns.

    Returns:
        ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``, one entry a token. Each of
        ``top_logprobs`` has the token itself too; it is null where there is no logprob, which is at the
        first token of a prompt.
    """
    return {
        "tokens": [token_name(item) for item in items],
        "token_logprobs": [_logprob(item) for item in items],
        "top_logprobs": [_top(item) for item in items],
        "text_offset": [offsets.take(item.token_id, _data(item)) for item in items],
    }


def prompt_offsets(
    text: str, items: Iterable[pb.TokenLogprob], special: Callable[[int], bool]
) -> TextOffsets:
    """Return the offset of the first of ``items``, the tokens of a prompt that came as ``text``.

    Control tokens among them are none of it, nor is a space that the tokenizer put in front.
    """
    spaces = _leading_spaces(_data(item) for item in items if not special(item.token_id))
    added = spaces > _leading_spaces([text.encode("utf-8")])
    return TextOffsets(Utf8Text(omitted_prefix=" " if added else ""), special)


def _leading_spaces(pieces: Iterable[bytes]) -> int:
    spaces = 0
    for piece in pieces:
        rest = piece.lstrip(b" ")
        spaces += len(piece) - len(rest)
        if rest:
            break
    return spaces


def chat_logprobs(items: Iterable[pb.TokenLogprob]) -> dict[str, Any]:
    """Return ``content``: a record for each token, with the likeliest ones in ``top_logprobs``."""
    content = [{**_record(item), "top_logprobs": [_record(top) for top in item.top]} for item in items]
    return {"content": content, "refusal": None}


def _count(items: Sequence[pb.TokenLogprob]) -> int:
    return sum(1 + len(item.top) for item in items)


def token_name(item: pb.TokenLogprob) -> str:
    if _broken(item):
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in item.utf8)
    return _text(item)


def _text(item: pb.TokenLogprob) -> str:
    return item.text or item.utf8.decode("utf-8")


def _data(item: pb.TokenLogprob) -> bytes:
    return item.utf8 or item.text.encode("utf-8")


def _broken(item: pb.TokenLogprob) -> bool:
    """Return whether the token's bytes are no text of their own."""
    if not item.utf8:
        return False
    try:
        item.utf8.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False


def _top(item: pb.TokenLogprob) -> dict[str, float] | None:
    if not item.HasField("logprob"):
        return None
    top: dict[str, float] = {}
    for other in (*item.top, item):
        # The likeliest come first, and several tokens may have one text.
        top.setdefault(token_name(other), max(other.logprob, _LOWEST))
    return top


def _record(item: pb.TokenLogprob) -> dict[str, Any]:
    return {"token": token_name(item), "logprob": _logprob(item), "bytes": list(_data(item))}


def _logprob(item: pb.TokenLogprob) -> float | None:
    return max(item.logprob, _LOWEST) if item.HasField("logprob") else None
