"""Images by every API of a real gateway: at URLs, and as tensors of KServe's protocol."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from diptych.client import ImageUrl, chat
from diptych.client.options import chat_prompt
from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc as kserve_rpc
from diptych.v1 import inference_pb2 as pb
from gateway.images.url_rules import is_public
from gateway.model.served_model import ServedModel
from tests import vision_models
from tests.gateway.frontends.kserve.tensors import add
from tests.gateway.frontends.openai.test_routes import post
from tests.gateway.images.remote_images import FILE, ImageHost, image_host, private_urls
from tests.gateway.images.test_fetcher import as_if_public
from tests.gateway.images.test_fetcher import resolve as resolve_test_names
from tests.gateway.running_gateway import Stack, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

MODEL = "llava"
DATA_URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.load(vision_models.write(MODEL, tmp_path_factory.mktemp(MODEL)), MODEL)


@pytest.fixture
def host() -> Iterator[ImageHost]:
    with image_host() as made:
        yield made


@pytest.fixture
async def stack(sees: ServedModel, redis_url: str, host: ImageHost) -> AsyncIterator[Stack]:
    hosts = f"images.test:{host.port},rebound.test:{host.port},localhost:{host.port}"
    workers = ScriptedPrefill(), ScriptedDecode(answering([5, 6]))
    async with running(sees, redis_url, *workers, allow_image_urls=hosts, max_image_mib=1) as made:
        yield made


def reach_loopback(stack: Stack, *, private: bool = False) -> None:
    """Give the host of images its name, and a public address unless that is to be judged as it is."""
    fetcher = stack.gateway.image_fetcher
    assert fetcher is not None
    fetcher._resolve = resolve_test_names
    fetcher._judge = is_public if private else as_if_public


def conversation(url: str) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]


async def counts(stack: Stack, url: str) -> list[int]:
    """Return the prompt tokens of a conversation with an image, as four calls count them."""
    chats = {"model": MODEL, "messages": conversation(url)}
    _, tokenized, _ = await post(stack, "/tokenize", chats)
    source: dict[str, str] = {"type": "url", "url": url}
    if url == DATA_URL:
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    turn = {
        "role": "user",
        "content": [{"type": "image", "source": source}, {"type": "text", "text": "What?"}],
    }
    _, counted, _ = await post(stack, "/v1/messages/count_tokens", {"model": MODEL, "messages": [turn]})
    _, answered, _ = await post(stack, "/v1/chat/completions", {**chats, "max_tokens": 2})
    shown = FILE if url == DATA_URL else ImageUrl(url)
    request = pb.TokenizeRequest(model=MODEL, chat=chat_prompt(chat("What?", images=[shown]), {}))
    found = await stack.stub.Tokenize(request)
    return [
        tokenized["count"],
        counted["input_tokens"],
        answered["usage"]["prompt_tokens"],
        len(found.token_ids),
    ]


async def test_an_image_at_a_url_counts_as_its_file_does_by_every_api(stack: Stack, host: ImageHost) -> None:
    reach_loopback(stack)
    expected = await counts(stack, DATA_URL)
    assert len(set(expected)) == 1
    assert await counts(stack, f"http://images.test:{host.port}/image") == expected
    assert host.settled() == 4
    fetched = stack.registry.get_sample_value("diptych_image_fetches_total", {"outcome": "fetched"})
    assert fetched == 4


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://elsewhere.test/a.png", "fetches no images from"),
        ("http://images.test:%PORT/missing", "status 404"),
        ("http://images.test:%PORT/text", "is no PNG"),
        ("http://images.test:%PORT/endless", "more bytes"),
        ("http://localhost:%PORT/image", "without a public address"),
    ],
)
async def test_what_is_not_fetched_is_refused_by_the_clients_name_of_its_field(
    stack: Stack, host: ImageHost, url: str, words: str
) -> None:
    reach_loopback(stack)
    url = url.replace("%PORT", str(host.port))
    status, answer, _ = await post(
        stack, "/v1/chat/completions", {"model": MODEL, "messages": conversation(url)}
    )
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith("messages[0].content[0].image_url")
    assert words in error["message"]
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    _, answer, _ = await post(stack, "/v1/responses", {"model": MODEL, "input": [item]})
    assert answer["error"]["param"] == "input[0].content[0].image_url"
    block = {"type": "image", "source": {"type": "url", "url": url}}
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    status, answer, _ = await post(stack, "/v1/messages", body)
    assert answer["error"]["message"].startswith("messages[0].content[0].source")


async def test_of_200_private_addresses_none_is_connected_to_through_the_gateway(
    stack: Stack, host: ImageHost
) -> None:
    """The last ones are asked for where loopback passes as public: the same host then counts them."""
    reach_loopback(stack, private=True)
    for number, url in enumerate(private_urls(host.port, 210)):
        if number == 200:
            assert host.settled() == 0
            reach_loopback(stack)
        status, _, _ = await post(stack, "/tokenize", {"model": MODEL, "messages": conversation(url)})
        assert number >= 200 or status == 400, url
    status, _, _ = await post(
        stack,
        "/tokenize",
        {"model": MODEL, "messages": conversation(f"http://rebound.test:{host.port}/image")},
    )
    assert status == 200
    assert host.settled() > 0


async def test_without_allowed_hosts_a_url_is_refused(
    sees: ServedModel, redis_url: str, host: ImageHost
) -> None:
    async with running(sees, redis_url) as stack:
        assert stack.gateway.image_fetcher is None
        url = f"http://images.test:{host.port}/image"
        status, answer, _ = await post(stack, "/tokenize", {"model": MODEL, "messages": conversation(url)})
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
        assert "fetches no images" in answer["error"]["message"]
    assert host.settled() == 0


def infer(*images: bytes, datatype: str = "BYTES") -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=MODEL)
    add(request, "text_input", "BYTES", [b"What?"])
    add(request, "image", datatype, list(images) if datatype == "BYTES" else [1])
    return request


async def test_kserve_takes_images_as_bytes_and_in_base64(stack: Stack) -> None:
    stub = kserve_rpc.GRPCInferenceServiceStub(stack.channel)
    answer = await stub.ModelInfer(infer(FILE, base64.b64encode(FILE)))
    assert {one.name for one in answer.outputs} == {"text_output", "token_ids", "finish_reason"}
    metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name=MODEL))
    assert [(one.name, one.datatype) for one in metadata.inputs][-1] == ("image", "BYTES")
    for asked, words in (
        (infer(b"?"), "inputs[image]: is no PNG"),
        (infer(base64.b64encode(b"no image")), "inputs[image]: is no PNG"),
        (infer(datatype="INT32"), "inputs[image].datatype"),
        (infer(*[FILE] * 9), "inputs[image]: a request may have 8 images"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(asked)
        assert words in (refused.value.details() or "")
