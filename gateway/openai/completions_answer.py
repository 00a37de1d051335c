"""Answers of ``/v1/completions``, with the prompt in front of the output where ``echo`` asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from diptych.v1 import inference_pb2 as pb
from gateway.openai.answer import Answer, ending, event_ending
from gateway.openai.draft import Asked
from gateway.openai.logprobs import completion_logprobs


class CompletionsAnswer(Answer):
    """
    Args:
        decode: the text of token ids, for prompts that came as ids and are to be echoed.
    """

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    event_object: ClassVar[str] = "text_completion"

    def __init__(
        self,
        asked: Asked,
        *,
        model: str,
        fingerprint: str,
        created: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        super().__init__(asked, model=model, fingerprint=fingerprint, created=created)
        self._decode = decode
        self._offsets: dict[int, int] = {}  # characters so far, by choice; kept for text_offset only

    def opening(self, prompt: int, info: pb.PromptInfo) -> list[str]:
        if not self._asked.echo and not self._asked.token_ids:
            return []
        text = self._prompt_text(prompt, info) if self._asked.echo else ""
        logprobs, offset = None, 0
        if self._asked.echo and self._asked.logprobs:
            logprobs, offset = completion_logprobs(info.logprobs, 0)
        events = []
        for index in range(self._asked.choices):
            number = self._number(prompt, index)
            self._offsets[number] = offset
            ids = f',"prompt_token_ids":{json.dumps(list(info.token_ids))}' if self._asked.token_ids else ""
            events.append(
                f'{{"index":{number},"text":{json.dumps(text)},"logprobs":{json.dumps(logprobs)},'
                f'"finish_reason":null{ids}}}'
            )
        return events

    def event_choice(self, number: int, output: pb.OutputDelta) -> str:
        output, logprobs = self._shown(output), "null"
        if self._asked.logprobs and not self._asked.prompt_only:
            found, self._offsets[number] = completion_logprobs(output.logprobs, self._offsets.get(number, 0))
            logprobs = json.dumps(found)
        ids = f',"token_ids":{json.dumps(list(output.token_ids))}' if self._asked.token_ids else ""
        said = f'"text":{json.dumps(output.text)},"logprobs":{logprobs}'
        return f'{{"index":{number},{said},{event_ending(output)}{ids}}}'

    def whole_choice(
        self, number: int, prompt: int, info: pb.PromptInfo, output: pb.OutputDelta
    ) -> dict[str, Any]:
        asked, output = self._asked, self._shown(output)
        text, scored = output.text, list(output.logprobs)
        if asked.echo:
            text = self._prompt_text(prompt, info) + text
            scored = [*info.logprobs, *scored]
        choice = {
            "index": number,
            "text": text,
            "logprobs": completion_logprobs(scored, 0)[0] if asked.logprobs else None,
            **ending(output),
        }
        if asked.token_ids:
            choice["token_ids"] = list(output.token_ids)
            choice["prompt_token_ids"] = list(info.token_ids)
        return choice

    def _shown(self, output: pb.OutputDelta) -> pb.OutputDelta:
        """What the client sees of an output: where only the prompt was wanted, that it is over."""
        if not self._asked.prompt_only:
            return output
        return pb.OutputDelta(finish_reason=pb.FINISH_REASON_LENGTH if output.finish_reason else None)

    def _prompt_text(self, prompt: int, info: pb.PromptInfo) -> str:
        request = self._asked.drafts[prompt].request
        return request.text if request.WhichOneof("prompt") == "text" else self._decode(info.token_ids)
