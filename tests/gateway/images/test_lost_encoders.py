"""Requests with images while no encode worker is there, and requests of text beside them."""

from __future__ import annotations

import pytest

from diptych.client import chat
from diptych.client.options import chat_prompt
from diptych.v1 import inference_pb2 as pb
from gateway.model.served_model import ServedModel
from tests import vision_models
from tests.gateway.images.remote_images import FILE
from tests.gateway.running_gateway import DIGEST, collect, ids_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

MODEL = "llava"
ANSWER = [5, 6]
IMAGES = 8
"""Requests with images: more than prefill workers get at once."""


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.load(vision_models.write(MODEL, tmp_path_factory.mktemp(MODEL)), MODEL)


def prefill(*, encodes: bool) -> ScriptedPrefill:
    """Return a prefill worker that takes rows of images, and makes them itself or not."""
    worker = ScriptedPrefill()
    worker.image_rows, worker.encodes = "rows", int(encodes)
    return worker


async def test_text_passes_images_that_wait_for_an_encoder(
    sees: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.session.retry_policy.FIRST_WAIT_S", 300.0)  # for a starved machine
    with_image = chat_prompt(chat("What? " * 60, images=[FILE]), {})
    workers = prefill(encodes=False), ScriptedDecode(answering(ANSWER))
    back = prefill(encodes=True)
    async with running(sees, redis_url, *workers, worker_wait_timeout=300.0) as stack:
        asked = [
            stack.stub.StreamGenerate(pb.GenerateRequest(model=MODEL, chat=with_image)) for _ in range(IMAGES)
        ]
        await until(lambda: len(stack.gateway.live) == IMAGES)
        text = await collect(stack.stub.StreamGenerate(pb.GenerateRequest(model=MODEL, text="Hello")))
        assert ids_of(text) == ANSWER
        assert not any(call.done() for call in asked)
        await back.start(redis_url, DIGEST)
        for call in asked:
            assert ids_of(await collect(call)) == ANSWER
        await stack.until_idle()
        await back.close()
