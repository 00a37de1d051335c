"""JSON of messages for scripts: 64-bit numbers at any depth are numbers."""

from __future__ import annotations

from diptych.runtime.message_json import message_members
from diptych.v1 import admin_pb2 as pb

RANK = pb.WorkerRank(pid=7, state="running", weight_bytes=2**40, kv_bytes=2**34)
WORKER = pb.WorkerInfo(
    worker_id="12",
    role=pb.WORKER_ROLE_DECODE,
    state=pb.WORKER_STATE_READY,
    load=pb.WorkerLoad(free_blocks=2**33, adapters=["34"], ranks=[RANK]),
)


def test_message_members_has_numbers_in_nested_messages() -> None:
    [worker] = message_members(pb.WatchLoadResponse(workers=[WORKER]))["workers"]
    [rank] = worker["load"]["ranks"]
    assert (rank["weight_bytes"], rank["kv_bytes"], rank["other_bytes"]) == (2**40, 2**34, 0)
    assert (worker["load"]["free_blocks"], worker["load"]["waiting_tokens"]) == (2**33, 0)


def test_message_members_leaves_text_that_looks_like_a_number() -> None:
    worker = message_members(WORKER)
    assert (worker["worker_id"], worker["load"]["adapters"]) == ("12", ["34"])


def test_message_members_shortens_enums_where_asked() -> None:
    short, full = (message_members(WORKER, short_enums=short) for short in (True, False))
    assert (short["role"], short["state"]) == ("decode", "ready")
    assert (full["role"], full["state"]) == ("WORKER_ROLE_DECODE", "WORKER_STATE_READY")
