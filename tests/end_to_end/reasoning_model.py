"""The tiny model with tokens and a template of reasoning, and requests whose output is sure to reason.

The weights are random: a bias makes the token that ends the reasoning likely, and a seed is sought with which
it comes neither at once nor late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import tiny_model
from tests.end_to_end.tiny_system import MODEL

TEMPLATE = Path(__file__).with_name("reasoning_template.jinja")
BIAS = 4.5
TOKENS = 96
SEEDS = range(200)


def write(folder: Path) -> Path:
    tiny_model.write(folder, ["</think>"])
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return folder


@dataclass(frozen=True)
class Split:
    """An output by its tokens."""

    reasoning: list[int]
    answer: list[int] | None  # None: the reasoning did not end


class Asker:
    """Requests to one system."""

    def __init__(self, folder: Path, stub: rpc.InferenceServiceStub, timeout_s: float = 60) -> None:
        self.tokenizer = Tokenizer.load(folder)
        self.open, self.close = self.id_of("<think>"), self.id_of("</think>")
        self._stub, self._timeout_s = stub, timeout_s

    def id_of(self, text: str) -> int:
        found = self.tokenizer.id_of(text)
        assert found is not None
        return found

    def request(self, seed: int = 0, *, tools: Sequence[pb.Tool] = (), **fields: Any) -> pb.GenerateRequest:
        """A question; `kwargs` are the template's, `choice` is of the tools."""
        kwargs, choice = fields.pop("kwargs", {}), fields.pop("choice", None)
        chat = pb.ChatPrompt(
            messages=[pb.ChatMessage(role="user", content="Why?")], tools=tools, tool_choice=choice
        )
        chat.template_kwargs.update(kwargs)
        values: dict[str, Any] = {
            "sampling": {"temperature": 1.0, "seed": seed, "logit_bias": {self.close: BIAS}},
            "stopping": {"max_tokens": TOKENS, "ignore_eos": True},
        } | fields
        return pb.GenerateRequest(model=MODEL, chat=chat, **values)

    def reasoning_request(self, least: int = 8, most: int = 40, **fields: Any) -> pb.GenerateRequest:
        """A question whose reasoning has from `least` to `most` tokens."""
        for seed in SEEDS:
            request = self.request(seed, **fields)
            ids = self._stub.Generate(request, timeout=self._timeout_s).outputs[0].token_ids
            split = self.split(ids)
            if split.answer and least <= len(split.reasoning) <= most:
                return request
        raise AssertionError("no seed will do")

    def split(self, token_ids: Sequence[int]) -> Split:
        """Split an output that begins within the reasoning, in the plainest way."""
        ids = list(token_ids)
        if self.close not in ids:
            return Split(ids, None)
        at = ids.index(self.close)
        return Split(ids[:at], ids[at + 1 :])

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special=True)


def joined(messages: Sequence[pb.GenerateResponse]) -> pb.GenerateResponse:
    """Put the messages of a stream together."""
    whole, by_index = pb.GenerateResponse(), dict[int, pb.OutputDelta]()
    for message in messages:
        for output in message.outputs:
            by_index.setdefault(output.index, pb.OutputDelta()).MergeFrom(output)
        rest = pb.GenerateResponse()
        rest.CopyFrom(message)
        del rest.outputs[:]
        whole.MergeFrom(rest)
    for index in sorted(by_index):
        output = whole.outputs.add()
        output.CopyFrom(by_index[index])
        output.text = "".join(
            one.text for message in messages for one in message.outputs if one.index == index
        )
        output.reasoning_content = "".join(
            one.reasoning_content for message in messages for one in message.outputs if one.index == index
        )
    return whole
