"""How much a worker has to do, between two of its load reports."""

from __future__ import annotations

from gateway.fleet.links import Link
from gateway.fleet.wires import Load, PrefillWire
from gateway.fleet.worker import Worker, new_worker
from runtime.directory.records import WorkerRecord


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
    link = Link(PrefillWire("g", 1), Silent(), worker_id="w", incarnation=1, address="127.0.0.1:1")
    return new_worker(record, link)


def test_what_ended_since_the_report_is_no_load_any_more() -> None:
    """Prompts of another gateway (700 tokens) stay counted."""
    one = worker()
    one.given("a", 1, 1000)
    one.given("b", 1, 300)
    one.reported(Load(waiting=3, waiting_tokens=2000))
    assert one.as_prefill().waiting_tokens == 2000
    one.done("a", 1)
    assert one.as_prefill().waiting_tokens == 1000
    one.given("c", 1, 50)
    assert one.as_prefill().waiting_tokens == 1050
    one.done("c", 1)  # which no report has counted
    assert one.as_prefill().waiting_tokens == 1000
    one.reported(Load(waiting=1, waiting_tokens=700))
    assert one.as_prefill().waiting_tokens == 700


def test_choices_that_ended_since_the_report_do_not_run_any_more() -> None:
    one = worker()
    one.given("a", 1, 100, choices=3)
    one.reported(Load(running=5))
    one.done("a", 1, 1)
    assert one.as_decode(0).sequences == 4
    one.done("a", 1)
    assert one.as_decode(0).sequences == 2
    one.lost()
    assert one.as_decode(0).sequences == 0
