"""The choice of what encodes an attempt's images."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from diptych.runtime.discovery.records import WorkerRecord
from gateway.worker_pool.encoders import EncoderCandidate, choose_encoder, reads_images

ROWS = "llava/float32"
PREFILL = WorkerRecord(
    worker_id="p",
    role="prefill",
    address="h:1",
    incarnation=1,
    model_digest="m",
    model_name="m",
    dtype="fp32",
    kv_dtype="float32",
    kv_layout="l",
    block_size=16,
    max_context=1024,
    total_blocks=0,
    num_threads=1,
    image_rows=ROWS,
    encodes=1,
)
WITHOUT = replace(PREFILL, encodes=0)
A, B = EncoderCandidate("a", ROWS, 0), EncoderCandidate("b", ROWS, 0)
OTHER = EncoderCandidate("c", "llava/bfloat16", 0)


def test_without_encode_workers_the_prefill_worker_encodes_if_it_can() -> None:
    assert choose_encoder(b"image", 5, PREFILL, []) is None
    assert reads_images(PREFILL, [])
    assert not reads_images(WITHOUT, [])
    assert not reads_images(WITHOUT, [OTHER])
    assert reads_images(WITHOUT, [OTHER, A])
    assert reads_images(replace(WITHOUT, image_rows=""), []), "one of the release before encodes itself"


def test_rows_of_another_format_are_not_taken() -> None:
    assert choose_encoder(b"image", 5, WITHOUT, [OTHER, A]) == "a"
    assert choose_encoder(b"image", 5, WITHOUT, [OTHER]) is None


def test_an_image_stays_with_its_encode_worker_until_others_have_much_less_to_do() -> None:
    images = [bytes([n]) * 32 for n in range(200)]
    homes = [choose_encoder(image, 10, PREFILL, [A, B]) for image in images]
    assert min(Counter(homes).values()) > 60
    busy = {"a": A._replace(waiting_rows=9), "b": B._replace(waiting_rows=9)}
    full = {"a": A._replace(waiting_rows=11), "b": B._replace(waiting_rows=11)}
    for image, home in zip(images, homes, strict=True):
        assert home is not None
        idle = [one for one in (A, B) if one.worker_id != home]
        assert choose_encoder(image, 10, PREFILL, [busy[home], *idle]) == home
        assert choose_encoder(image, 10, PREFILL, [full[home], *idle]) != home


def test_one_that_takes_nothing_new_is_better_than_none() -> None:
    leaving = A._replace(accepts_work=False)
    assert choose_encoder(b"image", 5, WITHOUT, [leaving]) == "a"
    assert choose_encoder(b"image", 5, WITHOUT, [leaving, B]) == "b"
    assert choose_encoder(b"image", 5, PREFILL, [leaving]) is None
