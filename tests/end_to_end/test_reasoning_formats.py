"""Forced calls after reasoning where marks are control tokens: gpt-oss' channels and Mistral's brackets.

The weights are random, and a bias ends the reasoning; the grammar of the calls has the control tokens itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from gateway.tools import deepseek
from tests.end_to_end import tiny_model
from tests.end_to_end.reasoning_model import Asker, joined
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_reasoning import REQUIRED, WEATHER
from tests.end_to_end.tiny_system import MODEL
from tests.forms import sampled

HARMONY = """{#- <|channel|>analysis<|message|> <|call|> <|return|> #}
{%- if tools %}{{ '<|start|>developer<|message|>' }}
{%- for tool in tools %}{{ 'type ' + tool.function.name + ';' }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
MISTRAL = """{#- [THINK] [/THINK] [TOOL_CALLS]name[ARGS]{} #}
{%- for tool in tools or [] %}{{ '[T]' + tool.function.name }}{% endfor %}
{%- for message in messages %}{{ '[INST]' + message.content + '[/INST]' }}{% endfor %}"""
TAGS = """{%- for tool in tools or [] %}{{ '[T]' + tool.function.name }}{% endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"""
CODER = "{#- <tool_call><function=name> #}" + TAGS
DEEPSEEK = "{#- <｜tool▁calls▁begin｜> #}" + TAGS
DEEPSEEK_TOKENS = ("</think>", *deepseek.MARKERS)
HARMONY_TOKENS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
)
MISTRAL_TOKENS = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")


@dataclass(frozen=True)
class Case:
    """A model's form, and the marks between which it reasons."""

    name: str
    template: str
    tokens: tuple[str, ...]
    call_format: str
    opens: str
    ends: str


CASES = [
    Case("harmony", HARMONY, HARMONY_TOKENS, "harmony", "<|message|>", "<|end|>"),
    Case("mistral", MISTRAL, MISTRAL_TOKENS, "mistral_args", "[THINK]", "[/THINK]"),
    Case("think", CODER, ("</think>",), "qwen3_coder", "<|im_start|>", "</think>"),
    Case("think", DEEPSEEK, DEEPSEEK_TOKENS, "deepseek_v31", "<|im_start|>", "</think>"),
]


@dataclass(frozen=True)
class System:
    """A running system with a model of a form."""

    case: Case
    stub: rpc.InferenceServiceStub
    asker: Asker


@pytest.fixture(scope="module", params=sampled(CASES, CASES[:1]), ids=lambda case: case.call_format)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    case: Case = request.param
    added = dict.fromkeys((*case.tokens, "</think>"))  # the Asker knows that one
    folder: Path = tiny_model.write(tmp_path_factory.mktemp(case.name), tuple(added))
    (folder / "chat_template.jinja").write_text(case.template)
    flags = ["--model", str(folder), "--model-name", MODEL, "--dtype", "fp32"]
    with running_stack(*flags) as stack, grpc.insecure_channel(stack.address) as channel:
        stub = rpc.InferenceServiceStub(channel)
        yield System(case, stub, Asker(folder, stub))


def test_the_model_card_names_both_forms(system: System) -> None:
    model = system.stub.GetModel(pb.GetModelRequest(model=MODEL), timeout=60).model
    assert model.capabilities.reasoning == system.case.name
    assert model.capabilities.tool_calls == system.case.call_format


def test_forced_calls_follow_the_reasoning(system: System) -> None:
    case, asker = system.case, system.asker
    opens, ends = asker.id_of(case.opens), asker.id_of(case.ends)
    reasoned = 0
    for seed in range(6):
        request = asker.request(seed, tools=[WEATHER], choice=REQUIRED)
        request.sampling.logit_bias.clear()
        request.sampling.logit_bias[ends] = 4.5
        request.sampling.logit_bias[opens] = 4.5
        request.stopping.max_tokens = 500
        whole = system.stub.Generate(request, timeout=60)
        streamed = joined(list(system.stub.StreamGenerate(request, timeout=60)))
        for answer in (whole, streamed):
            (output,) = answer.outputs
            (call,) = output.tool_calls
            assert call.name == "get_weather"
            assert json.loads(call.arguments_json)["city"] in ("Paris", "Rome")
            assert output.text == ""
            assert not any(token in output.reasoning_content for token in case.tokens)
            assert output.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert whole.outputs[0].reasoning_content == streamed.outputs[0].reasoning_content
        reasoned += ends in whole.outputs[0].token_ids
    assert reasoned
