"""`diptych workers --json --watch`: what is news of a worker."""

from __future__ import annotations

from diptych.cli.worker_lines import changes, described
from diptych.v1 import admin_pb2 as pb


def worker(name: str, state: int = pb.WORKER_STATE_READY, running: int = 0) -> pb.WorkerInfo:
    load = pb.WorkerLoad(running=running, free_blocks=2**40)
    return pb.WorkerInfo(worker_id=name, role=pb.WORKER_ROLE_DECODE, state=state, address="h:1", load=load)


def told(before: list[pb.WorkerInfo], now: list[pb.WorkerInfo]) -> list[tuple[object, object]]:
    was, are = ({one.worker_id: described(one) for one in workers} for workers in (before, now))
    return [(line["worker_id"], line["state"]) for line in changes(was, are)]


def test_described_has_names_and_numbers_as_they_are() -> None:
    line = described(worker("d", running=3))
    assert (line["role"], line["state"]) == ("decode", "ready")
    load = line["load"]
    assert isinstance(load, dict)
    assert (load["running"], load["free_blocks"], load["waiting"]) == (3, 2**40, 0)


def test_changes_are_those_that_last() -> None:
    assert told([], [worker("a")]) == [("a", "ready")]
    assert told([worker("a")], [worker("a", running=5)]) == []
    assert told([worker("a")], [worker("a", pb.WORKER_STATE_DRAINING)]) == [("a", "draining")]
    assert told([worker("a"), worker("b")], [worker("b")]) == [("a", "gone")]
