"""Reasoning through the whole system: a field of its own, and grammars that begin after it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import reasoning_model
from tests.end_to_end.reasoning_model import Asker, joined
from tests.end_to_end.stack import Stack, http_root, running_stack
from tests.end_to_end.tiny_system import MODEL
from tests.faults.second_gateway import second_gateway

REGEX = r"[a-f]{4} [0-9]{6}"
WEATHER = pb.Tool(
    name="get_weather",
    parameters_json_schema=json.dumps(
        {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        }
    ),
)
REQUIRED = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, parallel=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reasoning_model.write(tmp_path_factory.mktemp("reasoning"))


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with running_stack("--model", str(folder), "--model-name", MODEL, "--dtype", "fp32") as started:
        yield started


@pytest.fixture(scope="module")
def stub(stack: Stack) -> Iterator[rpc.InferenceServiceStub]:
    with grpc.insecure_channel(stack.address) as channel:
        yield rpc.InferenceServiceStub(channel)


@pytest.fixture(scope="module")
def asker(folder: Path, stub: rpc.InferenceServiceStub) -> Asker:
    return Asker(folder, stub)


def both(stub: rpc.InferenceServiceStub, request: pb.GenerateRequest) -> pb.GenerateResponse:
    """The whole answer, which the streamed one must equal."""
    whole = stub.Generate(request, timeout=60)
    messages = list(stub.StreamGenerate(request, timeout=60))
    streamed = joined(messages)
    assert used(streamed) == used(whole)
    for one, other in zip(whole.outputs, streamed.outputs, strict=True):
        assert (one.text, one.reasoning_content) == (other.text, other.reasoning_content)
        assert list(one.token_ids) == list(other.token_ids)
        assert one.finish_reason == other.finish_reason
    return whole


def used(answer: pb.GenerateResponse) -> tuple[int, int, int]:
    usage = answer.usage
    return usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens


def test_reasoning_has_a_field_of_its_own(stub: rpc.InferenceServiceStub, asker: Asker) -> None:
    request = asker.reasoning_request()
    answer = both(stub, request)
    (output,) = answer.outputs
    split = asker.split(output.token_ids)
    assert split.answer is not None
    assert output.reasoning_content == asker.text(split.reasoning).strip("\r\n")
    assert output.text == asker.text(split.answer).lstrip("\r\n")
    assert answer.usage.reasoning_tokens == len(split.reasoning) + 1
    assert answer.usage.completion_tokens == len(output.token_ids) == reasoning_model.TOKENS


def test_an_output_that_ends_within_its_reasoning_has_no_text(
    stub: rpc.InferenceServiceStub, asker: Asker
) -> None:
    request = asker.reasoning_request(least=8)
    request.stopping.max_tokens = 6
    answer = both(stub, request)
    (output,) = answer.outputs
    assert output.text == ""
    assert output.reasoning_content == asker.text(output.token_ids).strip("\r\n")
    assert output.finish_reason == pb.FINISH_REASON_LENGTH
    assert answer.usage.reasoning_tokens == 6


def test_a_prompt_that_ends_the_reasoning_leaves_an_answer(
    stub: rpc.InferenceServiceStub, asker: Asker
) -> None:
    answer = both(stub, asker.request(kwargs={"enable_thinking": False}))
    (output,) = answer.outputs
    assert (output.reasoning_content, answer.usage.reasoning_tokens) == ("", 0)
    assert output.text == asker.text(output.token_ids)


def test_an_output_may_open_its_reasoning_itself(stub: rpc.InferenceServiceStub, asker: Asker) -> None:
    opened = asker.request(3, kwargs={"unopened": True})
    opened.sampling.logit_bias[asker.open] = 40  # the first token at least
    answer = both(stub, opened)
    (output,) = answer.outputs
    assert output.token_ids[0] == asker.open
    assert answer.usage.reasoning_tokens > 1
    plain = asker.request(3, kwargs={"unopened": True})
    plain.sampling.logit_bias[asker.open] = -100
    answer = both(stub, plain)
    (output,) = answer.outputs
    assert (output.reasoning_content, answer.usage.reasoning_tokens) == ("", 0)
    assert output.text == asker.text(output.token_ids)


def test_a_grammar_begins_after_the_reasoning(stub: rpc.InferenceServiceStub, asker: Asker) -> None:
    free = asker.reasoning_request(least=12)
    for end in asker.tokenizer.eos_token_ids:  # none may come before the grammar's end
        free.sampling.logit_bias[end] = -100
    held = pb.GenerateRequest()
    held.CopyFrom(free)
    held.structured_output.regex = REGEX
    answer = both(stub, held)
    (output,) = answer.outputs
    split = asker.split(output.token_ids)
    assert split.answer is not None
    assert re.fullmatch(REGEX, output.text)
    assert output.text == asker.text(split.answer)
    assert not re.match(REGEX, output.reasoning_content)
    assert output.finish_reason == pb.FINISH_REASON_STOP
    # The grammar changes nothing before.
    unheld = stub.Generate(free, timeout=60).outputs[0]
    assert unheld.reasoning_content == output.reasoning_content
    assert not re.match(REGEX, unheld.text)
    # Control: without the span the output is what the grammar allows, from the first token on.
    held.chat.template_kwargs["enable_thinking"] = False
    alone = both(stub, held).outputs[0]
    assert re.fullmatch(REGEX, alone.text)
    assert alone.reasoning_content == ""


def test_a_grammar_holds_where_the_output_may_begin_with_either(
    stub: rpc.InferenceServiceStub, asker: Asker
) -> None:
    thinks = set()
    for bias in (-100, 8):
        request = asker.request(5, kwargs={"unopened": True}, structured_output={"regex": REGEX})
        request.stopping.max_tokens = 400
        request.sampling.logit_bias[asker.open] = bias
        (output,) = both(stub, request).outputs
        assert re.fullmatch(REGEX, output.text)
        thinks.add(bool(output.reasoning_content))
    assert thinks == {True, False}


def test_forced_calls_come_after_the_reasoning(stub: rpc.InferenceServiceStub, asker: Asker) -> None:
    request = asker.reasoning_request(tools=[WEATHER], choice=REQUIRED)
    request.stopping.max_tokens = 400
    (output,) = both(stub, request).outputs
    (call,) = output.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments_json)["city"] in ("Paris", "Rome")
    assert output.reasoning_content
    assert output.text == ""
    assert output.finish_reason == pb.FINISH_REASON_TOOL_CALLS


def test_stop_strings_are_not_looked_for_in_reasoning(stub: rpc.InferenceServiceStub, asker: Asker) -> None:
    request = asker.reasoning_request()
    whole = stub.Generate(request, timeout=60).outputs[0]
    stop = next(char for char in whole.text if char in whole.reasoning_content and char.isalnum())
    request.stopping.stop.append(stop)
    (output,) = both(stub, request).outputs
    assert output.stop_text == stop
    assert output.reasoning_content == whole.reasoning_content
    assert stop in output.reasoning_content
    assert output.text == whole.text.partition(stop)[0]
    # Control: without reasoning the same stop is found wherever it comes first.
    request.chat.template_kwargs["enable_thinking"] = False
    free = stub.Generate(request, timeout=60).outputs[0]
    assert stop not in free.text


def test_each_of_several_choices_reasons_by_itself(stub: rpc.InferenceServiceStub, asker: Asker) -> None:
    request = asker.reasoning_request(structured_output={"regex": REGEX})
    request.sampling.n = 4
    request.response.logprobs = 1
    request.stopping.max_tokens = 400
    answer = both(stub, request)
    counted = 0
    for output in answer.outputs:
        split = asker.split(output.token_ids)
        assert split.answer is not None
        assert re.fullmatch(REGEX, output.text)
        assert len(output.logprobs) == len(output.token_ids)
        counted += len(split.reasoning) + 1
    assert len({output.reasoning_content for output in answer.outputs}) > 1
    assert answer.usage.reasoning_tokens == counted


def test_a_broken_stream_is_resumed_within_its_reasoning_and_after_it(
    stub: rpc.InferenceServiceStub, asker: Asker
) -> None:
    request = asker.reasoning_request(structured_output={"regex": REGEX})
    request.stopping.max_tokens = 400
    messages = list(stub.StreamGenerate(request, timeout=60))
    whole = joined(messages)
    ids = list(whole.outputs[0].token_ids)
    reasoning = len(asker.split(ids).reasoning)
    for at in (2, reasoning, reasoning + 1, reasoning + 4):
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        again.resume_token = messages[0].resume_token
        again.received_token_ids.extend(ids[:at])
        rest = joined(list(stub.StreamGenerate(again, timeout=60)))
        (output,) = rest.outputs
        assert list(output.token_ids) == ids[at:]
        assert whole.outputs[0].text.endswith(output.text)
        assert whole.outputs[0].reasoning_content.endswith(output.reasoning_content)
        assert bool(output.reasoning_content) == (at < reasoning)
        assert used(rest) == used(whole)


def test_reasoning_of_earlier_turns_reaches_the_prompt(stub: rpc.InferenceServiceStub, asker: Asker) -> None:
    turns = [
        pb.ChatMessage(role="user", content="Why?"),
        pb.ChatMessage(role="assistant", content="So.", reasoning_content="Hm."),
        pb.ChatMessage(role="user", content="Why so?"),
    ]
    chat = pb.ChatPrompt(messages=turns)
    ids = stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=chat), timeout=60).token_ids
    assert "<think>\nHm.\n</think>\n\nSo." in asker.tokenizer.decode(ids, skip_special=False)
    request = asker.request(2)
    request.chat.CopyFrom(chat)
    # The span of the earlier turn is not taken for the end of this one.
    assert both(stub, request).usage.reasoning_tokens > 0


def test_http_has_reasoning_in_messages_and_deltas(
    stack: Stack, stub: rpc.InferenceServiceStub, asker: Asker
) -> None:
    request = asker.reasoning_request(least=12)
    whole = stub.Generate(request, timeout=60)
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Why?"}],
        "temperature": 1.0,
        "seed": request.sampling.seed,
        "logit_bias": {str(asker.close): reasoning_model.BIAS},
        "max_tokens": reasoning_model.TOKENS,
        "extra_body": {"ignore_eos": True},
    }
    with openai.OpenAI(base_url=f"{http_root(stack)}/v1", api_key="any", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(**body)
        message = answer.choices[0].message
        assert message.content == whole.outputs[0].text
        assert message.reasoning_content == whole.outputs[0].reasoning_content == message.reasoning
        details = answer.usage.completion_tokens_details
        assert details.reasoning_tokens == whole.usage.reasoning_tokens
        chunks = list(
            client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        )
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(thoughts) == message.reasoning_content
        assert "".join(delta.content or "" for delta in deltas) == message.content
        assert sum(map(bool, thoughts)) > 1  # a loaded machine joins most
        last = max(index for index, thought in enumerate(thoughts) if thought)
        assert not any(delta.content for delta in deltas[:last])
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == details.reasoning_tokens
        body["max_tokens"] = 6
        cut = client.chat.completions.create(**body).choices[0]
        assert cut.message.content is None
        assert cut.finish_reason == "length"
        # A second turn gives the reasoning back, under either name.
        turns = [*body["messages"], {"role": "assistant", "content": "So.", "reasoning": "Hm."}]
        body["messages"] = [*turns, {"role": "user", "content": "Why so?"}]
        long = client.chat.completions.create(**body).usage.prompt_tokens
        del turns[1]["reasoning"]
        assert client.chat.completions.create(**body).usage.prompt_tokens < long


def test_none_leaves_reasoning_in_the_text(folder: Path, stack: Stack, asker: Asker) -> None:
    request = asker.reasoning_request()
    with (
        second_gateway(stack, folder, {"DIPTYCH_REASONING_PARSER": "none"}) as plain,
        grpc.insecure_channel(plain.address) as channel,
    ):
        answer = rpc.InferenceServiceStub(channel).Generate(request, timeout=60)
    (output,) = answer.outputs
    assert (output.reasoning_content, answer.usage.reasoning_tokens) == ("", 0)
    assert output.text == asker.text(output.token_ids)
    assert "</think>" in output.text


def test_anthropics_messages_have_reasoning_in_thinking_blocks(
    stack: Stack, stub: rpc.InferenceServiceStub, asker: Asker
) -> None:
    request = asker.reasoning_request(least=12)
    whole = stub.Generate(request, timeout=60)

    def ask(messages: list[dict[str, Any]], **members: Any) -> str:
        body = {
            "model": MODEL,
            "messages": messages,
            "temperature": 1.0,
            "seed": request.sampling.seed,
            "logit_bias": {str(asker.close): reasoning_model.BIAS},
            "max_tokens": reasoning_model.TOKENS,
            "ignore_eos": True,
            **members,
        }
        head = {"Content-Type": "application/json"}
        url = f"{http_root(stack)}/v1/messages"
        sent = urllib.request.Request(url, json.dumps(body).encode(), head)
        with urllib.request.urlopen(sent, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    question = {"role": "user", "content": "Why?"}
    answer = json.loads(ask([question]))
    thinking, text = answer["content"]
    assert (thinking["type"], text["type"]) == ("thinking", "text")
    assert thinking["thinking"] == whole.outputs[0].reasoning_content
    assert text["text"] == whole.outputs[0].text
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] == whole.usage.reasoning_tokens
    lines = ask([question], stream=True).splitlines()
    deltas = [json.loads(line[6:])["delta"] for line in lines if '"content_block_delta"' in line[6:]]
    assert "".join(delta.get("thinking", "") for delta in deltas) == thinking["thinking"]
    assert "".join(delta.get("text", "") for delta in deltas) == text["text"]
    history = [question, {"role": "assistant", "content": answer["content"]}, question]
    assert json.loads(ask(history))["content"]
    hidden = json.loads(
        ask([question], thinking={"type": "enabled", "budget_tokens": 99, "display": "omitted"})
    )
    assert [block["type"] for block in hidden["content"]] == ["text"]
