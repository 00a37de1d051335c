"""The load of a worker between two of its reports."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.runtime.discovery.records import WorkerRecord
from gateway.attempt.types import Role
from gateway.worker_pool.codec import Load, PrefillCodec
from gateway.worker_pool.links import Link
from gateway.worker_pool.prefix_held import NOTHING
from gateway.worker_pool.registry import Worker, WorkerRegistry, new_worker


class IgnoringListener:
    """A listener for links that are never started."""

    def on_up(self, *args: object) -> None: ...
    def on_down(self, *args: object) -> None: ...
    def on_load(self, *args: object) -> None: ...
    def on_events(self, *args: object) -> None: ...
    def on_flushed(self, *args: object) -> None: ...
    def on_adapter_answer(self, *args: object) -> None: ...


def worker() -> Worker:
    record = WorkerRecord(
        worker_id="w",
        role="prefill",
        address="127.0.0.1:1",
        incarnation=1,
        model_digest="m",
        model_name="m",
        dtype="fp32",
        kv_dtype="fp32",
        kv_layout="l",
        block_size=16,
        max_context=2048,
        total_blocks=100,
        num_threads=1,
    )
    link = Link(PrefillCodec("g", 1), IgnoringListener(), worker_id="w", incarnation=1, address="127.0.0.1:1")
    return new_worker(record, link)


@pytest.mark.parametrize(("read", "limit"), [(2048, 1600), (500, 500)])
def test_token_limit_is_that_of_pool_and_context_of_decode_and_of_prefill_workers(
    read: int, limit: int
) -> None:
    """Workers that were started one by one may have a --max-model-len each."""
    prefill = worker()
    prefill.record = dataclasses.replace(prefill.record, max_context=read)
    serving = {Role.PREFILL: [prefill], Role.DECODE: [worker()]}
    registry: Any = SimpleNamespace(serving=serving.__getitem__)
    assert WorkerRegistry.token_limit(registry) == limit
    serving[Role.DECODE] = []
    assert WorkerRegistry.token_limit(registry) is None


def test_load_adds_unreported_work_and_is_at_least_the_outstanding_work() -> None:
    one = worker()
    one.assign("a", 1, 1000, [0])
    assert one.prefill_candidate(NOTHING, 0.001).waiting_tokens == 1000
    one.on_load(Load(waiting=3, waiting_tokens=2000))
    one.assign("b", 1, 50, [0])
    assert one.prefill_candidate(NOTHING, 0.001).waiting_tokens == 2050
    one.complete("b", 1)
    one.on_load(Load())
    assert one.prefill_candidate(NOTHING, 0.001).waiting_tokens == 1000
    one.complete("a", 1)
    assert one.prefill_candidate(NOTHING, 0.001).waiting_tokens == 0


def test_choice_completed_twice_counts_once() -> None:
    """A cancelled choice whose terminal message was on its way; the other choice goes on."""
    one = worker()
    one.assign("a", 1, 100, [0, 1])
    one.on_load(Load(running=2))
    one.complete("a", 1, [1])
    one.complete("a", 1, [1])
    assert one.decode_candidate(NOTHING, 0.001).sequences == 2  # as reported
    one.on_load(Load(running=0))
    assert one.decode_candidate(NOTHING, 0.001).sequences == 1  # it is still outstanding
    one.complete("a", 1, [0])
    assert one.decode_candidate(NOTHING, 0.001).sequences == 0
