"""Handshake: the transport that a hello gets, the reason for a refusal, the comparison of fingerprints."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from diptych.worker.v1 import handoff_pb2
from kvtransfer.drivers.handshake import Fingerprint, Handshake, incompatible_field
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import ReceiverHooks, host_id
from kvtransfer.transports.pool_memory import allocate_pool
from kvtransfer.transports.registry import make_receiver
from tests.kvtransfer.conftest import FINGERPRINT, LAYOUT

HERE = host_id()
HOOKS = ReceiverHooks(*[lambda *arguments: None] * 5)


def answer(
    ours: list[str],
    theirs: list[str],
    host: str = HERE,
    device: str = "",
    ours_is: Fingerprint = FINGERPRINT,
    theirs_is: Fingerprint = FINGERPRINT,
) -> str:
    pool = allocate_pool(LAYOUT, 2)
    made = [make_receiver(name, pool, "127.0.0.1", HOOKS) for name in ours]
    hello = handoff_pb2.HandoffHello(
        fingerprint=theirs_is.to_proto(), transports=theirs, host_id=host, device=device
    )
    found = Handshake(WriterId("decode", 1), ours_is, 2, made).choose_transport(hello)
    return found if isinstance(found, str) else f"-> {found.name}"


@pytest.mark.parametrize(
    ("theirs", "host", "device", "said"),
    [
        (["shared_memory", "tcp"], HERE, "", "-> shared_memory"),
        (["tcp", "shared_memory"], HERE, "", "-> tcp"),
        (["shared_memory", "tcp"], "elsewhere", "", "-> tcp"),
        (["cuda_shared", "cuda_ipc", "tcp"], HERE, "GPU-1", "-> tcp"),
        (["shared_memory"], "elsewhere", "", "transports (shared_memory: on another host)"),
        (["gloo", "nccl"], HERE, "", "transports (none in common)"),
        ([], HERE, "", "transports (none in common)"),
    ],
)
def test_choose_transport_takes_the_first_that_serves_both(theirs, host, device, said):
    assert answer(["shared_memory", "tcp"], theirs, host, device) == said


def test_choose_transport_names_every_obstacle():
    said = answer(["shared_memory", "nccl"], ["nccl", "shared_memory"], "elsewhere")
    assert said == "transports (nccl: its blocks must be on a GPU; shared_memory: on another host)"


FREE = {"tensor_parallel", "draft_digest"}
"""Fields in which two workers may differ."""


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint) if field.name not in FREE])
def test_incompatible_field_names_the_difference(field):
    value = getattr(FINGERPRINT, field)
    other = replace(FINGERPRINT, **{field: value + ("x" if isinstance(value, str) else 1)})
    assert incompatible_field(FINGERPRINT, other) == field
    assert incompatible_field(Fingerprint.from_proto(other.to_proto()), other) is None


def test_degrees_may_differ_and_a_peer_that_names_no_parts_has_one():
    assert incompatible_field(FINGERPRINT, replace(FINGERPRINT, tensor_parallel=3)) is None
    message = FINGERPRINT.to_proto()
    message.ClearField("sum_parts")
    assert Fingerprint.from_proto(message) == FINGERPRINT


DRAFTING = replace(FINGERPRINT, kv_layout=f"{FINGERPRINT.kv_layout}+draft/l/bf16+order", draft_digest="d")
PLAIN = replace(FINGERPRINT, kv_layout=f"{FINGERPRINT.kv_layout}+order")


@pytest.mark.parametrize(
    "other",
    [
        PLAIN,
        replace(DRAFTING, draft_digest="e"),
        replace(DRAFTING, kv_layout=DRAFTING.kv_layout.replace("bf16", "fp32")),
    ],
    ids=["none", "digest", "type"],
)
def test_drafters_may_differ_where_a_transport_moves_segments(other):
    assert incompatible_field(DRAFTING, other) is None
    assert DRAFTING.drafter != other.drafter
    assert answer(["gloo", "tcp"], ["gloo", "tcp"], ours_is=DRAFTING, theirs_is=other) == "-> tcp"
    said = answer(["gloo"], ["gloo"], ours_is=DRAFTING, theirs_is=other)
    assert said == "transports (gloo: moves whole blocks, and the drafters differ)"
    assert answer(["gloo"], ["gloo"], ours_is=DRAFTING, theirs_is=replace(DRAFTING)) == "-> gloo"
    assert incompatible_field(DRAFTING, FINGERPRINT) == "kv_layout", "the rest of the layout counts"


def test_parts_keep_caches_apart():
    assert FINGERPRINT.cache_layout == FINGERPRINT.kv_layout
    assert replace(FINGERPRINT, sum_parts=6).cache_layout == f"{FINGERPRINT.kv_layout}+parts-6"


def test_fingerprint_has_every_field_of_the_wire():
    names = {field.name for field in FINGERPRINT.to_proto().DESCRIPTOR.fields}
    assert names == {field.name for field in fields(Fingerprint)}
