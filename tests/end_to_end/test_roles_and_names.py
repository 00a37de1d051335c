"""A template without a branch for developers, several served names, and pages of other origins."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, http_root, running_stack

# As Llama 2's and Mistral's: a system turn is looked at where it comes first, and developers nowhere.
TEMPLATE = (
    "{% if messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("first", "org/second")
ORIGINS = ("https://a.example", "http://localhost:3000")
RULE, QUESTION = "Answer in one word, always.", "Which colour has the sky?"
Turn = tuple[str, str]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tiny_model.write(tmp_path_factory.mktemp("roles"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--served-model-name", *NAMES, "--cors-allow-origin", *ORIGINS)
    with running_stack("--model", str(folder), "--dtype", "fp32", *flags) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def stub(stack: Stack) -> Iterator[rpc.InferenceServiceStub]:
    with grpc.insecure_channel(stack.address) as channel:
        yield rpc.InferenceServiceStub(channel)


def over_http(client: openai.OpenAI, *turns: Turn) -> tuple[int, str | None]:
    """The prompt's tokens, and the answer."""
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    answer = client.chat.completions.create(
        model=NAMES[0], messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens, answer.choices[0].message.content


def over_grpc(stub: rpc.InferenceServiceStub, *turns: Turn) -> tuple[int, str]:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    request = pb.GenerateRequest(
        model=NAMES[0],
        chat=pb.ChatPrompt(messages=messages),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingCriteria(max_tokens=8, ignore_eos=True),
    )
    answer = stub.Generate(request, timeout=60)
    return answer.usage.prompt_tokens, answer.outputs[0].text


def test_a_developers_turn_becomes_the_systems_over_both_apis(
    client: openai.OpenAI, stub: rpc.InferenceServiceStub
) -> None:
    alone = over_http(client, ("user", QUESTION))
    as_system = over_http(client, ("system", RULE), ("user", QUESTION))
    assert alone[0] + len(RULE) / 8 < as_system[0]
    assert over_http(client, ("developer", RULE), ("user", QUESTION)) == as_system
    assert over_grpc(stub, ("system", RULE), ("user", QUESTION)) == as_system
    assert over_grpc(stub, ("developer", RULE), ("user", QUESTION)) == as_system


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_turn_that_would_vanish_is_refused_over_both_apis(
    client: openai.OpenAI, stub: rpc.InferenceServiceStub, role: str
) -> None:
    turns = (("system", RULE), ("user", QUESTION), ("assistant", "Blue"), (role, RULE), ("user", QUESTION))
    with pytest.raises(openai.BadRequestError) as refused:
        over_http(client, *turns)
    assert refused.value.param == "messages[3].role"
    with pytest.raises(grpc.RpcError) as failed:
        over_grpc(stub, *turns)
    assert failed.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)
    assert fields_of(failed.value) == ["chat.messages[3].role"]


def fields_of(error: grpc.RpcError) -> list[str]:
    status = rpc_status.from_call(error)
    assert status is not None
    found = error_details_pb2.BadRequest()
    assert any(detail.Unpack(found) for detail in status.details)
    return [violation.field for violation in found.field_violations]


def test_every_served_name_is_listed_and_answers(
    client: openai.OpenAI, stub: rpc.InferenceServiceStub
) -> None:
    assert [one.id for one in client.models.list().data] == list(NAMES)
    [listed] = stub.ListModels(pb.ListModelsRequest()).models
    assert (listed.name, *listed.aliases) == NAMES
    answers = []
    for name in NAMES:
        answer = client.completions.create(model=name, prompt="a", max_tokens=2, temperature=0)
        assert answer.model == name
        answers.append(answer.choices[0].text)
        whole = stub.Generate(pb.GenerateRequest(model=name, text="a", stopping={"max_tokens": 1}))
        assert whole.usage.completion_tokens == 1
    assert answers[0] == answers[1]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="roles", prompt="a", max_tokens=1)


def test_pages_of_the_allowed_origins_may_ask_and_read(stack: Stack) -> None:
    body = {"model": NAMES[0], "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for origin in ORIGINS:
        status, allowed = as_page(stack, "OPTIONS", {"Access-Control-Request-Method": "POST"}, origin)
        assert (status, allowed) == (204, origin)
        for stream in (False, True):
            assert as_page(stack, "POST", {}, origin, {**body, "stream": stream}) == (200, origin)
    assert as_page(stack, "POST", {}, "https://evil.example", body) == (200, None)


def as_page(
    stack: Stack, method: str, headers: dict[str, str], origin: str, body: dict[str, Any] | None = None
) -> tuple[int, str | None]:
    """The status, and the origin whose pages may read the answer."""
    request = urllib.request.Request(
        f"{http_root(stack)}/v1/chat/completions",
        method=method,
        headers={"Origin": origin, "Content-Type": "application/json", **headers},
        data=None if body is None else json.dumps(body).encode(),
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
        return answer.status, answer.headers["Access-Control-Allow-Origin"]
