"""Images of requests: limits, the child process that decodes, and what it costs when that is lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.image_spec import ImageSpec
from diptych.runtime.errors import Draining, ImageMemory, InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway.images.decoder import ImageDecoder
from gateway.images.intake import ImageIntake, ImageLimits
from gateway.images.memory import HeldMemory
from tests.diptych.runtime.images.test_decode import bomb, clear
from tests.vision_models import picture, png

HALF = (0.5, 0.5, 0.5)
SPEC = ImageSpec("llava", (35, 35), 25, "<image>", 5, 3, 1 / 255, HALF, HALF, shortest_edge=35)
LIMITS = ImageLimits(count=3, file_bytes=100_000)
MEMORY = 3 * 3 * 35 * 35
"""Bytes of three images' pixels."""


def chat(*files: bytes, media_type: str = "") -> pb.ChatPrompt:
    parts = [pb.ContentPart(text="What?")]
    parts += [pb.ContentPart(image=pb.Image(data=data, media_type=media_type)) for data in files]
    return pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=parts)])


def peak_kib(pid: int) -> int:
    """Return the most memory that a process took."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.fixture
async def intake() -> AsyncIterator[ImageIntake]:
    made = ImageIntake(ImageDecoder(SPEC, 10_000), LIMITS, HeldMemory(MEMORY))
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        (chat(bomb()), "chat.messages[0].parts[1].image", "pixels"),
        (chat(png(picture(1, 20, 20)), b"x"), "chat.messages[0].parts[2].image", "is no PNG"),
        (chat(b""), "chat.messages[0].parts[1].image", "has no data"),
        (chat(*[png(picture(1, 20, 20))] * 4), "chat.messages[0].parts[4].image", "may have 3 images"),
        (chat(bytes(60_000), bytes(60_000)), "chat.messages[0].parts[2].image", "100000 bytes together"),
        (
            chat(b"x", media_type="image/tiff"),
            "chat.messages[0].parts[1].image.media_type",
            "must be image/png",
        ),
    ],
)
async def test_bad_images_are_refused_by_the_name_of_their_field(
    intake: ImageIntake, asked: pb.ChatPrompt, field: str, words: str
) -> None:
    with pytest.raises(InvalidParameter, match=words) as refused:
        await intake.prepare(asked, "tenant")
    assert refused.value.violations[0].field == field
    assert len(await intake.prepare(chat(png(picture(1, 20, 20))), "tenant")) == 1


async def test_an_image_that_comes_twice_is_decoded_and_held_once(intake: ImageIntake) -> None:
    a, b = png(picture(1, 20, 20)), png(picture(2, 20, 20))
    images = await intake.prepare(chat(a, b, a), "tenant")
    assert images[0] is images[2]
    assert images[0].digest != images[1].digest
    assert intake._memory.held_bytes == 2 * 3 * 35 * 35
    others = await intake.prepare(chat(a), "tenant")
    with pytest.raises(ImageMemory):
        await intake.prepare(chat(b), "tenant")
    del images, others
    gc.collect()
    assert intake._memory.held_bytes == 0
    assert len(await intake.prepare(chat(b), "tenant")) == 1


async def test_memory_of_an_image_is_bounded_by_its_pixels() -> None:
    """A palette's transparent colour is never there as a whole but in its first and its last form."""
    intake = ImageIntake(ImageDecoder(SPEC, 36_000_000), LIMITS, HeldMemory(MEMORY))
    decoder = intake._decoder
    assert decoder is not None
    await intake.prepare(chat(clear(4000, 3000)), "tenant")
    process = decoder.process
    assert process is not None
    assert peak_kib(process.pid) < 160 << 10
    await intake.close()
    square = ImageIntake(ImageDecoder(replace(SPEC, pads=True), 36_000_000), LIMITS, HeldMemory(MEMORY))
    with pytest.raises(InvalidParameter, match="takes too much memory"):
        await square.prepare(chat(clear(20_000, 100)), "tenant")
    await square.close()


async def test_a_refused_file_delays_its_tenant_and_no_other(
    intake: ImageIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.images.decoder.REFUSED_S", 3600.0)
    first, second = (asyncio.create_task(intake.prepare(chat(bomb()), "greedy")) for _ in range(2))
    assert len(await intake.prepare(chat(png(picture(1, 20, 20))), "other")) == 1
    assert not first.done()
    assert not second.done()
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert len(await intake.prepare(chat(png(picture(1, 20, 20))), "greedy")) == 1


async def test_tenants_of_refused_files_share_one_lane_and_an_image_leads_out_of_it(
    intake: ImageIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.images.decoder.REFUSED_S", 0.0)
    for tenant in ("a", "b"):
        with pytest.raises(InvalidParameter):
            await intake.prepare(chat(bomb()), tenant)
    monkeypatch.setattr("gateway.images.decoder.SUSPECTS_S", 3600.0)
    good = chat(png(picture(1, 20, 20)))
    assert len(await intake.prepare(good, "a")) == 1  # the lane is free again in an hour
    waiting = asyncio.create_task(intake.prepare(good, "b"))
    for tenant in ("a", "other"):
        assert len(await intake.prepare(good, tenant)) == 1
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_lost_child_is_replaced_and_the_image_decoded(intake: ImageIntake) -> None:
    file = png(picture(1, 20, 20))
    (before,) = await intake.prepare(chat(file), "tenant")
    decoder = intake._decoder
    assert decoder is not None
    assert decoder.process is not None
    decoder.process.kill()
    (after,) = await intake.prepare(chat(file), "tenant")
    assert after.data == before.data


async def test_a_cancelled_caller_leaves_the_next_one_its_own_answer(intake: ImageIntake) -> None:
    a, b = png(picture(1, 90, 90)), png(picture(2, 30, 30))
    (alone,) = await intake.prepare(chat(b), "tenant")
    waiting = [asyncio.create_task(intake.prepare(chat(a), tenant)) for tenant in ("x", "y")]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    (found,) = await intake.prepare(chat(b), "tenant")
    assert found.data == alone.data


async def test_a_model_of_text_refuses_images_and_takes_conversations_without() -> None:
    intake = ImageIntake(None, LIMITS, HeldMemory(MEMORY))
    with pytest.raises(UnsupportedFeature, match="this model reads text only") as refused:
        await intake.prepare(chat(b"x"), "tenant")
    assert refused.value.violations[0].field == "chat.messages[0].parts[1].image"
    assert await intake.prepare(chat(), "tenant") == ()


async def test_the_end_refuses_images(intake: ImageIntake) -> None:
    await intake.close()
    with pytest.raises(Draining):
        await intake.prepare(chat(png(picture(1, 20, 20))), "tenant")


async def test_the_end_meets_an_image_that_is_decoded_and_leaves_no_process(intake: ImageIntake) -> None:
    decoder = intake._decoder
    assert decoder is not None
    decoding = asyncio.create_task(intake.prepare(chat(png(picture(1, 20, 20))), "tenant"))
    while decoder.process is None:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await intake.close()
    with pytest.raises(Draining):
        await decoding
    assert decoder.process is None
