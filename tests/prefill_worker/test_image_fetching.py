"""Rows that an encode worker makes: which are asked for at dispatch, which after the grant, what fails."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.worker.v1 import prefill_pb2, work_pb2
from diptych.worker_process.attempt import Attempt
from kvtransfer.drivers.embedding_client import EncoderAddress
from kvtransfer.protocol.messages import Key
from prefill_worker.image_fetching import ImageFetching
from prefill_worker.request_images import RequestImages

A, B = b"a" * 32, b"b" * 32
WHERE = EncoderAddress("host:1", 7)
KEY = ("r", 1)


@dataclass
class Source:
    """Links to encode workers, whose messages are kept."""

    sent: list[tuple[str, EncoderAddress | None, Key, bytes]] = field(default_factory=list)

    def ask(self, where: EncoderAddress, key: Key, digest: bytes) -> None:
        self.sent.append(("ask", where, key, digest))

    def taken(self, where: EncoderAddress, key: Key) -> None:
        self.sent.append(("taken", where, key, b""))

    def drop(self, key: Key) -> None:
        self.sent.append(("drop", None, key, b""))


@dataclass
class Prompt:
    """A prompt with image A at tokens 2 to 7 and image B at 10 to 15."""

    cached: int = 0
    kept: EmbeddingCache = field(default_factory=lambda: EmbeddingCache(1 << 20))
    source: Source = field(default_factory=Source)
    failed: list[tuple[Key, work_pb2.Failure]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    images: RequestImages = field(init=False)

    def __post_init__(self) -> None:
        self.fetching = ImageFetching(
            self.kept,
            whole=False,
            on_image=self.seen.append,
            on_failed=lambda key, why: self.failed.append((key, why)),
        )
        self.fetching.source = self.source
        spans = [
            work_pb2.ImageSpan(first_position=first, rows=5, digest=digest)
            for first, digest in ((2, A), (10, B))
        ]
        work = work_pb2.Work(
            id=work_pb2.AttemptId(request_id="r", attempt=1),
            token_ids=[1] * 20,
            prompt_tokens=20,
            stopping=work_pb2.Stopping(max_tokens=1),
            images=spans,
        )
        self.images = self.fetching.open(Attempt.from_work(work, max_context=100))
        encoder = prefill_pb2.Encoder(address="host:1", incarnation=7, cached_tokens=self.cached)
        self.fetching.begin(KEY, self.images, encoder)

    def asked(self) -> list[bytes]:
        return [digest for what, _, _, digest in self.source.sent if what == "ask"]

    def ended(self) -> list[str]:
        return [what for what, *_ in self.source.sent if what != "ask"]


def rows(count: int = 5) -> torch.Tensor:
    return torch.zeros(count, 4)


def test_rows_are_asked_for_at_dispatch_and_the_encode_worker_may_forget_when_all_came() -> None:
    prompt = Prompt()
    assert prompt.asked() == [A, B]
    assert prompt.source.sent[0] == ("ask", WHERE, KEY, A)
    assert prompt.images.awaited == {A, B}
    prompt.fetching.arrived(KEY, B, rows())
    assert prompt.images.awaited == {A}
    assert not prompt.images.ready(0)
    assert prompt.ended() == []
    prompt.fetching.arrived(KEY, A, rows())
    assert prompt.images.ready(0)
    assert not prompt.images.awaited
    assert prompt.ended() == ["taken"]
    assert prompt.seen == ["fetched", "fetched"]
    assert prompt.kept.get(A) is not None


@pytest.mark.parametrize(("cached", "early", "late"), [(8, [B], [A]), (16, [], [A, B])])
def test_rows_of_tokens_that_should_be_cached_are_asked_for_after_a_grant_without_them(
    cached: int, early: list[bytes], late: list[bytes]
) -> None:
    prompt = Prompt(cached=cached)
    assert prompt.asked() == early
    prompt.fetching.granted(KEY, 0)
    assert prompt.asked() == [*early, *late]
    assert prompt.images.awaited == {A, B}


def test_rows_of_cached_tokens_are_never_asked_for() -> None:
    prompt = Prompt(cached=16)
    assert prompt.ended() == []
    prompt.fetching.granted(KEY, 16)
    assert prompt.asked() == []
    assert prompt.ended() == ["taken"]


def test_rows_that_are_kept_here_are_not_fetched_again() -> None:
    kept = EmbeddingCache(1 << 20)
    kept.put(A, rows())
    prompt = Prompt(kept=kept)
    assert prompt.asked() == [B]
    assert prompt.seen == ["cached"]
    prompt.fetching.flush()
    assert kept.get(A) is None


def test_an_attempt_that_ends_wants_nothing_more() -> None:
    prompt = Prompt()
    prompt.fetching.drop(KEY)
    assert prompt.ended() == ["drop"]
    prompt.fetching.arrived(KEY, A, rows())
    assert not prompt.images.ready(0)
    prompt.fetching.granted(KEY, 0)
    assert prompt.asked() == [A, B]


@pytest.mark.parametrize("how", ["lost", "too few rows"])
def test_an_attempt_without_its_rows_fails_once(how: str) -> None:
    prompt = Prompt()
    if how == "lost":
        prompt.fetching.failed(KEY, work_pb2.Failure(reason=work_pb2.FAILURE_REASON_ENCODER_LOST))
    else:
        prompt.fetching.arrived(KEY, A, rows(4))
    prompt.fetching.failed(KEY, work_pb2.Failure())
    reason = "ENCODER_LOST" if how == "lost" else "COMPUTE_FAILED"
    [(key, failure)] = prompt.failed
    assert (key, work_pb2.FailureReason.Name(failure.reason)) == (KEY, f"FAILURE_REASON_{reason}")
