"""Answers of ``/v1/completions``, with the prompt in front of the output where ``echo`` asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from diptych.v1 import inference_pb2 as pb
from gateway.cooperative_yield import Yielder
from gateway.frontends.openai.answer import ChoicesAnswer, ids_inside, inside
from gateway.frontends.openai.logprobs import LISTS, TextOffsets, completion_lists, prompt_offsets
from gateway.frontends.openai.request_builder import HttpGenerateRequest
from gateway.output.detokenizer import Utf8Text
from gateway.request.validation import skips_special


@dataclass(slots=True)
class _Echo:
    """Prompt as it comes back, in JSON without what encloses it; empty where it was not asked for.

    ``offsets``: where the output begins, after the text that ``lists``, its scores, are about.
    """

    text: str = ""
    ids: str = ""
    lists: Sequence[str] = field(default=("",) * len(LISTS))
    offsets: TextOffsets = field(default_factory=TextOffsets)


class CompletionsAnswer(ChoicesAnswer):
    """
    Args:
        decode: the text of token ids, for prompts that came as ids and are to be echoed.
        text_after: where the output's text begins after such a prompt (see `gateway.output.detokenizer`);
            after no ids, where a text of its own does.
        special: whether a token is a control token.
    """

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    event_object: ClassVar[str] = "text_completion"

    def __init__(
        self,
        asked: HttpGenerateRequest,
        *,
        model: str,
        fingerprint: str,
        created: int,
        decode: Callable[[Sequence[int]], str],
        text_after: Callable[[Sequence[int]], Utf8Text],
        special: Callable[[int], bool],
    ) -> None:
        super().__init__(asked, model=model, fingerprint=fingerprint, created=created)
        self._decode = decode
        self._text_after = text_after
        self._special = special
        self._offsets: dict[int, TextOffsets] = {}  # by choice; what comes of it in pieces is one text
        self._echoes: dict[int, _Echo] = {}  # by prompt; of whole answers, whose choices come one by one

    async def opening(self, prompt: int, info: pb.PromptInfo, turns: Yielder) -> list[list[str]]:
        asked = self._asked
        echo = await self._echo(prompt, info, turns)
        for index in range(asked.choices if asked.logprobs else 0):
            self._offsets[self._number(prompt, index)] = echo.offsets.copy()
        if not asked.echo and not asked.token_ids:
            return []
        logprobs = _logprobs([[part] for part in echo.lists]) if asked.echo and asked.logprobs else ["null"]
        events = []
        for index in range(asked.choices):
            number = self._number(prompt, index)
            ids = [',"prompt_token_ids":[', echo.ids, "]"] if asked.token_ids else []
            opened = [f'{{"index":{number},"text":"', echo.text, '","logprobs":', *logprobs]
            events.append([*opened, ',"finish_reason":null', *ids, "}"])
        return events

    async def event_choice(self, number: int, output: pb.OutputDelta, turns: Yielder) -> str:
        output, logprobs = self._shown(output), "null"
        if self._asked.logprobs and not self._asked.prompt_only:
            lists = await completion_lists(output.logprobs, self._offsets[number], turns)
            logprobs = "".join(_logprobs([[part] for part in lists]))
        ids = ""
        if self._asked.token_ids:
            ids = f',"token_ids":[{await ids_inside(output.token_ids, turns)}]'
        members = f'"text":{json.dumps(output.text)},"logprobs":{logprobs}'
        return f'{{"index":{number},{members},{self._event_ending(output)}{ids}}}'

    async def whole_choice(
        self, number: int, prompt: int, info: pb.PromptInfo, output: pb.OutputDelta, turns: Yielder
    ) -> list[str]:
        asked, output = self._asked, self._shown(output)
        echo = self._echoes.get(prompt) or await self._echo(prompt, info, turns)
        self._echoes[prompt] = echo
        pieces = [f'{{"index": {number}, "text": "', echo.text, inside(output.text), '", "logprobs": ']
        if asked.logprobs:
            own = await completion_lists(output.logprobs, echo.offsets.copy(), turns)
            pieces += _logprobs(zip(echo.lists, own, strict=True))
        else:
            pieces.append("null")
        pieces.append(f", {inside(self._ending(output))}")
        if asked.token_ids:
            pieces.append(f', "token_ids": [{await ids_inside(output.token_ids, turns)}]')
            pieces += [', "prompt_token_ids": [', echo.ids, "]"]
        return [*pieces, "}"]

    def _shown(self, output: pb.OutputDelta) -> pb.OutputDelta:
        """Return the output as the client sees it: where only the prompt was wanted, that it is over."""
        if not self._asked.prompt_only:
            return output
        return pb.OutputDelta(finish_reason=pb.FINISH_REASON_LENGTH if output.finish_reason else None)

    async def _echo(self, prompt: int, info: pb.PromptInfo, turns: Yielder) -> _Echo:
        """Make what comes back of a prompt, once for all its choices."""
        asked, echo = self._asked, _Echo()
        if asked.echo:
            echo.text = inside(self._prompt_text(prompt))
        if asked.echo and asked.logprobs:
            echo.offsets = self._prompt_offsets(prompt, info)
            echo.lists = await completion_lists(info.logprobs, echo.offsets, turns)
        if asked.logprobs:
            echo.offsets.go_on(self._output_text(prompt), self._special if self._skips(prompt) else None)
        if asked.token_ids:
            echo.ids = await ids_inside(self._prompt_ids(prompt) or info.token_ids, turns)
        return echo

    def _prompt_text(self, prompt: int) -> str:
        """Return the text up to where the output's begins; all of it where no output is shown."""
        ids = self._prompt_ids(prompt)
        text = self._decode(ids) if ids else self._asked.builders[prompt].request.text
        belongs_to_output = self._output_text(prompt).unfinished and not self._asked.prompt_only
        return text[:-1] if belongs_to_output else text  # without the U+FFFD for it

    def _prompt_offsets(self, prompt: int, info: pb.PromptInfo) -> TextOffsets:
        if self._prompt_ids(prompt):
            return TextOffsets(self._text_after(()))
        return prompt_offsets(self._asked.builders[prompt].request.text, info.logprobs, self._special)

    def _output_text(self, prompt: int) -> Utf8Text:
        ids = self._prompt_ids(prompt)
        return self._text_after(ids) if ids else Utf8Text()

    def _skips(self, prompt: int) -> bool:
        """Return whether the output's text leaves control tokens out."""
        return skips_special(self._asked.builders[prompt].request.response)

    def _prompt_ids(self, prompt: int) -> Sequence[int]:
        """Return the ids of a prompt that came as ids; a text has whole characters only."""
        return self._asked.builders[prompt].request.token_ids.ids


def _logprobs(lists: Iterable[Iterable[str]]) -> list[str]:
    """Return the JSON object in pieces; each of its lists is given in parts, some possibly empty."""
    pieces: list[str] = []
    for name, parts in zip(LISTS, lists, strict=True):
        pieces.append(f'{"," if pieces else "{"}"{name}":[')
        between = ""
        for part in filter(None, parts):
            pieces += [between, part]
            between = ","
        pieces.append("]")
    return [*pieces, "}"]
