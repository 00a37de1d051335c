"""Images through the whole system, of several families: the answers are transformers' own, whatever happens.

All but Idefics3, Gemma 3 and Qwen3-VL go over tcp; all but the first two have an encode worker. Only
Qwen2.5-VL is not a part of the long form.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from PIL import Image

from diptych.v1 import admin_pb2, admin_pb2_grpc
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests import mmproj_twins, vision_models
from tests.adapters import merged, write_text_adapter
from tests.diptych.runtime.images.test_decode import bomb
from tests.end_to_end.stack import START_TIMEOUT_S, Stack, http_root, running_stack

MODEL = "tiny-vision"
OUTPUT = 24
SIZES = {"square": (40, 40), "wide": (97, 31), "tall": (19, 88)}
Part = str | Image.Image


@dataclass(frozen=True)
class Served:
    """A running system, and transformers' model and processor of its folder."""

    family: str
    folder: Path
    stack: Stack
    model: Any
    processor: Any
    rows_by: str | None
    """Transport of rows from the encode worker; None: the prefill worker encodes."""

    @property
    def image_token(self) -> int:
        """Id of the token that stands for a row of an image."""
        found: int = self.model.config.image_token_id
        return found

    def expected(
        self, turns: Sequence[tuple[str, Sequence[Part]]], count: int = OUTPUT
    ) -> tuple[list[int], list[int]]:
        """Return transformers' ids of a conversation's prompt, and of its greedy answer of `count` tokens."""
        images = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        messages = [{"role": role, "content": [_as_part(part) for part in parts]} for role, parts in turns]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        kept = vision_models.inputs_of(self.processor, self.family, text, images)
        with torch.inference_mode():
            found = self.model.generate(
                **kept, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
            )
        prompt: list[int] = kept["input_ids"][0].tolist()
        answer: list[int] = found[0].tolist()
        return prompt, answer[len(prompt) :] if len(answer) > count else answer


def _as_part(part: Part) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def request(
    turns: Sequence[tuple[str, Sequence[Part]]], count: int = OUTPUT, **fields: Any
) -> pb.GenerateRequest:
    chat = pb.ChatPrompt()
    for role, parts in turns:
        message = chat.messages.add(role=role)
        for part in parts:
            if isinstance(part, str):
                message.parts.add(text=part)
            else:
                message.parts.add(image=pb.Image(data=vision_models.png(part)))
    return pb.GenerateRequest(
        model=MODEL,
        chat=chat,
        stopping={"max_tokens": count, "min_tokens": count},
        response={"echo_prompt": True},
        **fields,
    )


def ask(stack: Stack, *requests: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async def all_of_them() -> list[pb.GenerateResponse]:
        async with grpc.aio.insecure_channel(stack.address) as channel:
            stub = rpc.InferenceServiceStub(channel)
            return list(await asyncio.gather(*(stub.Generate(one, timeout=60) for one in requests)))

    return asyncio.run(all_of_them())


def seconds(duration: Duration) -> float:
    return float(duration.ToNanoseconds() / 1e9)


def phases(answer: pb.GenerateResponse) -> dict[str, float]:
    """Return the phases of a request, which follow one another."""
    names = ("queue", "encode", "prefill", "kv_transfer", "decode_queue", "decode")
    return {name: seconds(getattr(answer.timings, name)) for name in names}


def ids(answer: pb.GenerateResponse, index: int = 0) -> list[int]:
    return list(answer.outputs[index].token_ids)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("idefics3", marks=pytest.mark.full),
        "qwen2_5_vl",
        pytest.param("gemma3", marks=pytest.mark.full),
        pytest.param("llava", marks=pytest.mark.full),
        pytest.param("qwen3_vl", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl as GGUF", marks=pytest.mark.full),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, _, form = request.param.partition(" as ")
    folder = vision_models.write(family, tmp_path_factory.mktemp(family))
    files = ["--model", str(folder)]
    if form:
        pair = mmproj_twins.write(family, folder, tmp_path_factory.mktemp(form))
        files = ["--model", str(pair.text), "--mmproj", str(pair.mmproj)]
    flags = [*files, "--model-name", MODEL, "--dtype", "fp32", "--prefill-chunk", "48"]
    inside = family in ("idefics3", "gemma3")  # the prefill worker encodes
    transport = "shared_memory" if inside or family == "qwen3_vl" else "tcp"
    flags += ["--transport", transport, *([] if inside else ["--encode", "1"])]
    with running_stack(*flags, "--kv-blocks", "256", "--set", "gateway.max-images=4") as stack:
        yield Served(
            family,
            folder,
            stack,
            vision_models.oracle(family, folder),
            vision_models.processor(family, folder),
            None if inside else transport,
        )


def conversations(served: Served) -> list[list[tuple[str, list[Part]]]]:
    a, b, c = (vision_models.picture(seed, *size) for seed, size in enumerate(SIZES.values()))
    d = vision_models.picture(3, 23, 25)
    return [
        [("user", ["What is this? ", a])],
        [("user", [b, "and", c, "differ?"])],
        [("user", ["Look: ", c]), ("assistant", ["I see."]), ("user", ["And ", a, b, "or ", d])],
        [("user", ["No image at all, just words."])],
    ]


def test_answers_equal_transformers_alone_and_mixed_with_text(served: Served) -> None:
    turns = conversations(served)
    expected = [served.expected(one) for one in turns]
    alone = [ask(served.stack, request(one, cache={"salt": "alone"}))[0] for one in turns]
    mixed = ask(served.stack, *(request(one, cache={"salt": f"m{n}"}) for n in range(4) for one in turns))
    for (prompt, answer), one in zip(expected, alone, strict=True):
        assert list(one.prompt.token_ids) == prompt
        assert ids(one) == answer
        assert one.usage.prompt_tokens == len(prompt)
    assert [ids(one) for one in mixed] == [answer for _, answer in expected] * 4
    if served.rows_by is not None:
        got, all_of_them = (
            served.stack.metric("prefill", "diptych_embedding_bytes_total", label=label)
            for label in (f'"{served.rows_by}"', "")
        )
        assert got == all_of_them > 0
    # Control: with the two images swapped the answer is another one.
    (role, (first, words, second, rest)), *_ = turns[1]
    assert served.expected([(role, [second, words, first, rest])])[1] != expected[1][1]


def test_the_same_image_is_cached_and_another_one_shares_no_token(served: Served) -> None:
    a, b = (vision_models.picture(seed, 61, 52) for seed in (70, 71))
    turns = [("user", [a, "What is it?"])]
    (first,) = ask(served.stack, request(turns))
    encoded = served.stack.metric("prefill", "diptych_images_total")
    (again,) = ask(served.stack, request(turns))
    assert phases(first)["encode"] > 0
    assert sum(phases(first).values()) <= seconds(first.timings.total)
    assert not again.timings.HasField("encode")
    assert ids(again) == ids(first) == served.expected(turns)[1]
    assert again.usage.cached_prompt_tokens >= len(first.prompt.token_ids) - 17
    other_turns = [("user", [b, "What is it?"])]
    (other,) = ask(served.stack, request(other_turns))
    assert ids(other) == served.expected(other_turns)[1] != ids(first)
    before_image = list(other.prompt.token_ids).index(served.image_token)
    assert other.usage.cached_prompt_tokens <= before_image // 16 * 16
    more = [*turns, ("assistant", ["This."]), ("user", ["And now?"])]
    (later,) = ask(served.stack, request(more))
    assert ids(later) == served.expected(more)[1]
    assert later.usage.cached_prompt_tokens >= before_image + 16
    (salted,) = ask(served.stack, request(turns, cache={"salt": "another"}))
    assert salted.usage.cached_prompt_tokens == 0
    assert ids(salted) == ids(first)
    assert served.stack.metric("prefill", "diptych_images_total") > encoded


def test_several_choices_logprobs_and_grammars_work_with_images(served: Served) -> None:
    turns = [("user", ["Say: ", vision_models.picture(9, 45, 33)])]
    _, answer = served.expected(turns)
    asked = request(turns)
    asked.response.logprobs = 2
    asked.sampling.n = 3
    (several,) = ask(served.stack, asked)
    assert [ids(several, index) for index in range(3)] == [answer] * 3
    assert all(len(output.logprobs) == OUTPUT for output in several.outputs)
    held = request(turns)
    held.stopping.ClearField("min_tokens")
    held.structured_output.regex = "(yes|no)"
    (constrained,) = ask(served.stack, held)
    assert constrained.outputs[0].text in ("yes", "no")


def test_an_adapter_answers_about_images_as_merged_weights_do(served: Served, tmp_path: Path) -> None:
    """A prompt with an image shares no cached token with that of the base; both encode it once."""
    adapter = write_text_adapter(tmp_path / "adapter", served.model, seed=5)
    adapted = replace(served, model=merged(served.model, adapter))
    turns = [("user", ["What of ", vision_models.picture(12, 52, 41), " and this?"])]
    (_, plain), (_, changed) = served.expected(turns), adapted.expected(turns)
    assert plain != changed
    with grpc.insecure_channel(served.stack.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        stub.LoadAdapter(admin_pb2.LoadAdapterRequest(name="of-text", path=str(adapter)), timeout=60)
        ask(served.stack, request(turns))
        for cached in (False, True):
            base, other = ask(served.stack, request(turns), request(turns, lora="of-text"))
            assert (ids(base), ids(other)) == (plain, changed)
            assert (other.usage.cached_prompt_tokens > 0) == cached
        stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="of-text"), timeout=60)


def over_http(served: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and body of an answer."""
    data = json.dumps({"model": MODEL, **body}).encode()
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(http_root(served.stack) + path, data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def data_url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def chat_body(*urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is this? "}, *images]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": OUTPUT, "min_tokens": OUTPUT}


def test_clients_of_openais_and_anthropics_get_the_same_answers(served: Served) -> None:
    image = vision_models.picture(0, *SIZES["square"])
    prompt, answer = served.expected([("user", ["What is this? ", image])])
    file = vision_models.png(image)
    status, chat = over_http(
        served, "/v1/chat/completions", {**chat_body(data_url(file)), "return_token_ids": True}
    )
    assert status == 200
    assert chat["choices"][0]["token_ids"] == answer
    assert chat["usage"]["prompt_tokens"] == len(prompt)
    part = {"type": "input_image", "image_url": data_url(file)}
    content = [{"type": "input_text", "text": "What is this? "}, part]
    body = {
        "input": [{"role": "user", "content": content}],
        "max_output_tokens": OUTPUT,
        "min_tokens": OUTPUT,
    }
    status, responses = over_http(served, "/v1/responses", body)
    assert status == 200
    assert responses["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file).decode()}
    blocks = [{"type": "text", "text": "What is this? "}, {"type": "image", "source": source}]
    body = {
        "messages": [{"role": "user", "content": blocks}],
        "max_tokens": OUTPUT,
        "min_tokens": OUTPUT,
    }
    status, messages = over_http(served, "/v1/messages", body)
    assert status == 200
    assert messages["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    status, counted = over_http(served, "/v1/messages/count_tokens", {"messages": body["messages"]})
    assert (status, counted) == (200, {"input_tokens": len(prompt)})
    tokenized = {
        "messages": [{"role": "user", "content": chat_body(data_url(file))["messages"][0]["content"]}]
    }
    status, tokens = over_http(served, "/tokenize", tokenized)
    assert (status, tokens["tokens"]) == (200, prompt)
    usage = messages["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    with urllib.request.urlopen(http_root(served.stack) + "/v1/models", timeout=60) as listed:
        assert json.load(listed)["data"][0]["input_modalities"] == ["text", "image"]


def test_hostile_images_are_refused_by_their_field_and_harm_nothing_else(served: Served) -> None:
    good = vision_models.png(vision_models.picture(5, 50, 50))
    hostile = {
        "pixels": data_url(bomb()),
        "cut off": data_url(good[: len(good) // 2]),
        "no PNG": data_url(b"MZ" + bytes(3000)),
        "not image/jpeg": data_url(good, "image/jpeg"),
        "must be image/png": data_url(good, "image/tiff"),
    }
    turns = conversations(served)[3]
    _, expected = served.expected(turns)
    before = served.stack.pids()
    for words, url in hostile.items():
        status, refused = over_http(served, "/v1/chat/completions", chat_body(data_url(good), url))
        assert status == 400
        assert words in refused["error"]["message"]
        assert refused["error"]["param"].startswith("messages[0].content[2].image_url")
        (beside,) = ask(served.stack, request(turns, cache={"salt": words}))
        assert ids(beside) == expected
    status, refused = over_http(served, "/v1/chat/completions", chat_body(*[data_url(good)] * 5))
    assert (status, refused["error"]["param"]) == (400, "messages[0].content[5].image_url")
    status, refused = over_http(served, "/v1/chat/completions", chat_body("https://127.0.0.1:1/a.png"))
    assert (status, refused["error"]["param"]) == (400, "messages[0].content[1].image_url.url")
    assert "fetches no images" in refused["error"]["message"]
    assert served.stack.pids() == before


def test_a_broken_stream_goes_on_with_its_images_and_no_others(served: Served) -> None:
    image, other = (vision_models.picture(seed, 44, 44) for seed in (90, 91))
    turns = [("user", ["Go on about ", image])]
    _, expected = served.expected(turns)

    async def first() -> pb.GenerateResponse:
        async with grpc.aio.insecure_channel(served.stack.address) as channel:
            async for message in rpc.InferenceServiceStub(channel).StreamGenerate(request(turns), timeout=60):
                return message
        raise AssertionError("no message")

    message = asyncio.run(first())
    got = ids(message)
    served.stack.wait_idle()
    resumed = {"resume_token": message.resume_token, "received_token_ids": got}
    (rest,) = ask(served.stack, request(turns, **resumed))
    assert got + ids(rest) == expected
    with pytest.raises(grpc.aio.AioRpcError, match="another request"):
        ask(served.stack, request([("user", ["Go on about ", other])], **resumed))


@pytest.mark.parametrize(
    "role", ["encode", *(pytest.param(role, marks=pytest.mark.full) for role in ("decode", "prefill"))]
)
def test_a_worker_that_dies_under_an_image_changes_no_token(served: Served, role: str) -> None:
    """A decode worker dies in mid-stream, the others as soon as they have the pixels.

    In place of an encode worker that is gone the prefill worker encodes.
    """
    count = 300
    image = vision_models.picture(33 + len(role), 50, 41)
    turns = [("user", ["Tell me all of ", image])]
    _, expected = served.expected(turns, count)
    victims = [worker["pid"] for worker in served.stack.account[role]]
    if not victims:
        pytest.skip("the prefill worker encodes")

    async def streamed() -> list[int]:
        found: list[int] = []
        if role != "decode":
            asyncio.get_running_loop().call_later(0.03, os.kill, victims.pop(), signal.SIGKILL)
        async with grpc.aio.insecure_channel(served.stack.address) as channel:
            stub = rpc.InferenceServiceStub(channel)
            async for message in stub.StreamGenerate(request(turns, count), timeout=120):
                for output in message.outputs:
                    found += output.token_ids
                while found and victims:
                    os.kill(victims.pop(), signal.SIGKILL)
        return found

    assert asyncio.run(streamed()) == expected
    assert not victims
    served.stack.wait_idle(START_TIMEOUT_S)  # the next one is there by then
