"""The screen of `diptych top`: rates, rows, and what a small terminal shows of them."""

from __future__ import annotations

from diptych.cli.top_screen import Rates, Sample, as_json, screen_lines
from diptych.v1 import admin_pb2 as pb

INFO = pb.GetServerInfoResponse(version="1.2.3", gateway_id="g-1", model="m", ready=True)


def load(workers: int = 2, tenants: int = 1, tokens: int = 0) -> pb.WatchLoadResponse:
    message = pb.WatchLoadResponse(running=5, waiting=3, generated_tokens=tokens, prompt_tokens=2 * tokens)
    message.phases.CopyFrom(pb.PhaseLoad(queued=3, decode=5))
    for number in range(workers):
        message.workers.add(
            worker_id=f"decode-{number}",
            role=pb.WORKER_ROLE_DECODE,
            state=pb.WORKER_STATE_READY,
            load=pb.WorkerLoad(running=4, free_blocks=25, total_blocks=100),
        )
    for number in range(tenants):
        message.tenants.add(tenant=f"t{number}", phases=pb.PhaseLoad(queued=1, decode=2), generated_tokens=70)
    return message


def test_rates_are_those_between_two_samples() -> None:
    first, second = Sample(10.0, load(tokens=100)), Sample(12.0, load(tokens=400))
    assert Rates.between(None, first) == Rates()
    assert Rates.between(first, second) == Rates(150.0, 300.0)
    assert Rates.between(second, Sample(13.0, load(tokens=390))) == Rates(0.0, 0.0)


def test_screen_has_phases_blocks_and_tenants() -> None:
    text = "\n".join(screen_lines(INFO, Sample(0.0, load()), Rates(1234.4, 0.0), 200))
    assert "5 running  3 waiting   phases  queued 3 routing 0 prefill 0 decode 5" in text
    assert "1,234 generated" in text
    assert f"{'█' * 15}{'·' * 5}  75% of 100" in text
    row = next(line for line in text.splitlines() if line.startswith("t0"))
    assert row.split() == ["t0", "1", "0", "2", "70"]


def test_worker_that_gets_nothing_is_explained() -> None:
    message = load()
    message.workers[0].state, message.workers[0].detail = pb.WORKER_STATE_DRAINING, "it leaves"
    lines = screen_lines(INFO, Sample(0.0, message), Rates(), 200)
    assert lines[-1] == "decode-0: it leaves"


def test_small_terminal_shows_the_head_and_counts_the_rest() -> None:
    lines = screen_lines(INFO, Sample(0.0, load(workers=50, tenants=50)), Rates(), 60, 20)
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith("requests  5 running")
    assert sum("more" in line for line in lines) == 2


def test_json_has_numbers() -> None:
    found = as_json(INFO, Sample(0.0, load(tokens=7)), Rates(1.5, None))
    assert (found["generated_tokens"], found["generated_tokens_per_s"]) == (7, 1.5)
    assert found["prompt_tokens_per_s"] is None
    assert found["workers"][0]["load"]["free_blocks"] == 25
    assert found["tenants"][0]["tenant"] == "t0"
