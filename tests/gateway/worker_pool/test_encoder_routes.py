"""Attempts with images in the pool: which worker encodes, and what each is sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from diptych.runtime.discovery.records import Role as RoleName
from diptych.runtime.discovery.records import WorkerRecord
from diptych.runtime.image_rows import pixels_digest
from gateway.attempt.types import EncoderRoute, Role
from gateway.attempt.work import Attempt, Job, TraceParent, build_work
from gateway.model.images import ImagePlace, PreparedImage, PromptImages
from gateway.worker_pool.codec import Load
from gateway.worker_pool.links import Link
from gateway.worker_pool.registry import new_worker
from gateway.worker_pool.router import NoProof, NoWorker, Placement, RouteRequest
from gateway.worker_pool.worker_pool import GatewayIdentity, WorkerPool
from tests.gateway.attempt.test_work import REQUEST
from tests.gateway.running_gateway import DIGEST
from tests.gateway.worker_pool.test_worker_pool import Journal, ListedWorkers

ROWS = "llava/float32"
NAMESPACE = bytes(range(32))
SHAPE = (1, 3, 2, 2)
IMAGE = PreparedImage(SHAPE, bytes(12), 0, 0, pixels_digest(SHAPE, bytes(12)))
IMAGES = PromptImages((IMAGE,), (ImagePlace(1, 2, 0, 0),))
PROMPT = (5, 9, 9, 6)


@dataclass
class Wire:
    """Stands in for a link that is up: it keeps what is sent."""

    sent: list[Any] = field(default_factory=list)
    up: bool = True
    suspected: bool = False
    last_seen: float = 100.0

    def send(self, message: Any) -> None:
        self.sent.append(message)


def record(worker_id: str, role: RoleName, **more: Any) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        address=f"{worker_id}:1",
        incarnation=7,
        model_digest=DIGEST,
        model_name="m",
        dtype="fp32",
        kv_dtype="float32",
        kv_layout="l",
        block_size=16,
        max_context=1024,
        total_blocks=64,
        num_threads=1,
        **more,
    )


@dataclass
class Pool:
    """A pool with a decode worker, a prefill worker, and encode workers."""

    own_encoder: bool
    encoders: tuple[str, ...]
    wires: dict[str, Wire] = field(default_factory=dict)

    def __post_init__(self) -> None:
        identity = GatewayIdentity("g", 1, DIGEST, b"secret")
        self.pool = WorkerPool(ListedWorkers(), Journal(), identity, clock=lambda: 100.0)
        self.add(record("d", "decode"))
        self.add(record("p", "prefill", image_rows=ROWS, encodes=int(self.own_encoder)))
        for name in self.encoders:
            self.add(record(name, "encode", image_rows=ROWS, encodes=1))

    def add(self, one: WorkerRecord) -> None:
        wire = self.wires[one.worker_id] = Wire()
        worker = new_worker(one, cast(Link, wire))
        worker.load = Load(free_blocks=64, total_blocks=64, max_running=8)
        self.pool.registry.add(worker)

    def place(self, images: PromptImages | None = IMAGES, *avoid: str) -> Any:
        request = RouteRequest("a", 4, 8, frozenset(avoid), images_end=0 if images is None else images.end)
        return self.pool.place_attempt(request, self.job(images), PROMPT)

    @staticmethod
    def job(images: PromptImages | None) -> Job:
        request = replace(REQUEST, prompt_ids=PROMPT, images=images)
        return Job("r~1", request, 4, (), None, TraceParent("", ""))


def test_an_encode_worker_gets_the_images_and_the_prefill_worker_its_address() -> None:
    pool = Pool(own_encoder=True, encoders=("e",))
    placement = pool.place()
    assert isinstance(placement, Placement)
    assert placement.encoder == EncoderRoute("e", 0)
    work = build_work(pool.job(IMAGES), Attempt(1, PROMPT, False), NAMESPACE, 0.0)
    pool.pool.encode_attempt("e", work, IMAGES)
    pool.pool.dispatch_attempt("p", "d", work, IMAGES, placement.encoder)
    pixels, encode = pool.wires["e"].sent
    assert pixels.image.data == IMAGE.data
    assert [span.digest for span in encode.encode.images] == [pixels.image.digest]
    assert encode.encode.cache_namespace == NAMESPACE
    [dispatch] = pool.wires["p"].sent
    assert (dispatch.dispatch.encoder.address, dispatch.dispatch.encoder.incarnation) == ("e:1", 7)
    assert pool.pool.registry.require("e").encoder_candidate().waiting_rows == 2


def test_without_one_the_prefill_worker_gets_them() -> None:
    pool = Pool(own_encoder=True, encoders=())
    placement = pool.place()
    assert isinstance(placement, Placement)
    assert placement.encoder is None
    work = build_work(pool.job(IMAGES), Attempt(1, PROMPT, False), NAMESPACE, 0.0)
    pool.pool.dispatch_attempt("p", "d", work, IMAGES, placement.encoder)
    pixels, dispatch = pool.wires["p"].sent
    assert pixels.image.data == IMAGE.data
    assert not dispatch.dispatch.HasField("encoder")


@pytest.mark.parametrize("own_encoder", [True, False])
def test_one_that_failed_the_attempt_is_avoided_as_long_as_images_can_be_encoded(own_encoder: bool) -> None:
    two = Pool(own_encoder=own_encoder, encoders=("e", "f"))
    assert two.place(IMAGES, "e").encode_id == "f"
    both = two.place(IMAGES, "e", "f")
    assert both == NoWorker(Role.ENCODE) if not own_encoder else both.encode_id is None
    two.wires["e"].suspected = True
    assert two.place().encode_id == "f"
    two.wires["f"].up = False
    assert two.place().encode_id == (None if own_encoder else "e")


def test_attempt_after_a_loss_waits_for_word_of_an_encode_worker() -> None:
    two = Pool(own_encoder=False, encoders=("e", "f"))
    request = RouteRequest("a", 4, 8, frozenset("e"), after_loss=True, images_end=IMAGES.end)

    def place(request: RouteRequest) -> Any:
        return two.pool.place_attempt(request, two.job(IMAGES), PROMPT)

    two.pool.placer.on_loss(150.0)  # both may have been killed, and one link has broken so far
    two.wires["p"].last_seen = two.wires["d"].last_seen = 160.0
    assert place(request) == NoProof()
    assert place(replace(request, after_loss=False)).encode_id == "f"
    two.wires["f"].last_seen = 160.0
    assert place(request).encode_id == "f"
    assert place(replace(request, suspected_at=170.0)) == NoProof(), "a peer's word is as good as a lost link"
    two.wires["f"].up = two.wires["e"].up = False
    assert place(request) == NoWorker(Role.ENCODE)


def test_attempt_after_a_loss_goes_to_a_prefill_worker_that_encodes_by_itself() -> None:
    two = Pool(own_encoder=True, encoders=("e", "f"))
    two.pool.placer.on_loss(150.0)
    two.wires["p"].last_seen = two.wires["d"].last_seen = 160.0
    request = RouteRequest("a", 4, 8, frozenset("e"), after_loss=True, images_end=IMAGES.end)
    assert two.pool.place_attempt(request, two.job(IMAGES), PROMPT).encode_id is None


def test_prompts_of_text_need_no_encoder() -> None:
    pool = Pool(own_encoder=False, encoders=())
    assert pool.place() == NoWorker(Role.ENCODE)
    text = pool.place(None)
    assert isinstance(text, Placement)
    assert text.encoder is None
    with_encoder = Pool(own_encoder=False, encoders=("e",))
    assert with_encoder.place(None).encoder is None
    assert not with_encoder.pool.registry.why_not_ready()
