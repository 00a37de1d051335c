"""How much a worker has to do, between two of its load reports."""

from __future__ import annotations

from diptych.runtime.discovery.records import WorkerRecord
from gateway.worker_pool.codec import Load, PrefillCodec
from gateway.worker_pool.links import Link
from gateway.worker_pool.worker import Worker, new_worker


class Silent:
    """Nothing is told: these links are never started."""

    def on_up(self, *told: object) -> None: ...
    def on_down(self, *told: object) -> None: ...
    def on_load(self, *told: object) -> None: ...
    def on_news(self, *told: object) -> None: ...
    def on_flushed(self, *told: object) -> None: ...


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
    link = Link(PrefillCodec("g", 1), Silent(), worker_id="w", incarnation=1, address="127.0.0.1:1")
    return new_worker(record, link)


def test_what_was_given_since_the_report_is_added_and_what_is_outstanding_is_the_least() -> None:
    one = worker()
    one.given("a", 1, 1000, [0])
    assert one.as_prefill().waiting_tokens == 1000
    one.reported(Load(waiting=3, waiting_tokens=2000))
    one.given("b", 1, 50, [0])
    assert one.as_prefill().waiting_tokens == 2050
    one.done("b", 1)
    one.reported(Load())
    assert one.as_prefill().waiting_tokens == 1000
    one.done("a", 1)
    assert one.as_prefill().waiting_tokens == 0


def test_a_choice_ends_once_however_often_that_is_said() -> None:
    """It is cancelled while its last word is on the way; the other one goes on."""
    one = worker()
    one.given("a", 1, 100, [0, 1])
    one.reported(Load(running=2))
    one.done("a", 1, [1])
    one.done("a", 1, [1])
    assert one.as_decode(0).sequences == 2  # as reported
    one.reported(Load(running=0))
    assert one.as_decode(0).sequences == 1  # it is still outstanding
    one.done("a", 1, [0])
    assert one.as_decode(0).sequences == 0
