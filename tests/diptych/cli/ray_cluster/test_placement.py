"""Placement on a Ray cluster: values in, groups and refusals out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.cli.preflight import BadOptions
from diptych.cli.ray_cluster.placement import LOCAL, Node, Placement, place
from diptych.cli.stack_options import StackOptions

HERE = "10.0.0.1"
NODES = [Node(HERE, 8.0), Node("10.0.0.2", 8.0)]
ADDRESS = f"{HERE}:6379"
SEVERAL = StackOptions(redis_url="redis://10.0.0.9:6379", insecure=True)


def placed(options: StackOptions = SEVERAL, *, nodes: Any = NODES, **changes: Any) -> Placement:
    return place(replace(options, **changes), ADDRESS, nodes, HERE)


def names(placement: Placement) -> list[tuple[str, list[str]]]:
    return [(one.strategy, list(one.bundles)) for one in placement.groups]


def test_auto_transport_packs_each_pair_on_a_node() -> None:
    found = names(placed(prefill_workers=2, decode_workers=2))
    assert found == [("STRICT_PACK", ["decode-0", "prefill-0"]), ("STRICT_PACK", ["decode-1", "prefill-1"])]


def test_workers_beyond_the_pairs_join_them_by_turns() -> None:
    found = names(placed(prefill_workers=2, decode_workers=3))
    assert found == [
        ("STRICT_PACK", ["decode-0", "decode-2", "prefill-0"]),
        ("STRICT_PACK", ["decode-1", "prefill-1"]),
    ]


def test_pairs_are_of_one_model() -> None:
    found = names(placed(model="a=/a,b=/b"))
    assert found == [("STRICT_PACK", ["decode-0", "prefill-0"]), ("STRICT_PACK", ["decode-1", "prefill-1"])]


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_transport_within_a_host_packs_all_workers_on_one_node(transport: str) -> None:
    found = names(placed(transport=transport, prefill_workers=2))
    assert found == [("STRICT_PACK", ["decode-0", "prefill-0", "prefill-1"])]


@pytest.mark.parametrize("transport", ["tcp", "gloo", "nccl"])
def test_copying_transport_spreads_the_workers(transport: str) -> None:
    found = names(placed(transport=transport, prefill_workers=2))
    assert found == [("SPREAD", ["decode-0", "prefill-0", "prefill-1"])]


@pytest.mark.parametrize(
    ("changes", "cpus", "threads"),
    [
        ({}, 4.0, 4),  # one pair on a node of 8
        ({"prefill_workers": 2, "decode_workers": 2}, 4.0, 4),  # a pair on each
        ({"prefill_workers": 4, "decode_workers": 4}, 2.0, 2),
        ({"transport": "tcp"}, 8.0, 8),  # a worker on each
        ({"transport": "shared_memory", "prefill_workers": 2}, 2.0, 2),
        ({"transport": "shared_memory", "prefill_workers": 15}, 0.5, 1),
    ],
)
def test_cpus_are_shared_by_the_workers_of_a_node(changes: dict[str, Any], cpus: float, threads: int) -> None:
    placement = placed(**changes)
    shares = {resources["CPU"] for one in placement.groups for resources in one.bundles.values()}
    assert shares == {cpus}
    assert (placement.options.prefill_threads, placement.options.decode_threads) == (threads, threads)


@pytest.mark.parametrize("transport", [None, "shared_memory", "tcp"])
@pytest.mark.parametrize("pairs", range(1, 10))
def test_nodes_have_room_for_all(pairs: int, transport: str | None) -> None:
    placement = placed(prefill_workers=pairs, decode_workers=pairs, transport=transport)
    free = [one.cpus for one in NODES]
    for group in placement.groups:
        parts = list(group.bundles.values())
        units = [parts] if group.strategy == "STRICT_PACK" else [[one] for one in parts]
        for unit in units:
            free.sort()
            free[-1] -= sum(one["CPU"] for one in unit)
    assert min(free) >= 0


def test_a_head_node_without_cpus_takes_no_worker() -> None:
    head = Node(HERE, 0.0)
    assert placed(nodes=[head, *NODES]).groups == placed().groups
    with pytest.raises(BadOptions, match="no node for the workers has CPUs"):
        placed(nodes=[head])


def test_chosen_threads_are_kept_and_reserved() -> None:
    [group] = placed(prefill_threads=3, decode_threads=1).groups
    assert {name: one["CPU"] for name, one in group.bundles.items()} == {"decode-0": 1.0, "prefill-0": 3.0}


def test_without_redis_all_programs_stay_on_the_node_of_the_command() -> None:
    for address in (LOCAL, ADDRESS):
        placement = place(StackOptions(), address, NODES[:1], HERE)
        assert placement.one_machine
        assert placement.gateway_stays
        pinned = [one for group in placement.groups for one in group.bundles.values()]
        assert all(one[f"node:{HERE}"] > 0 for one in pinned)


def test_workers_of_several_nodes_are_free_and_a_gateway_on_loopback_is_not() -> None:
    placement = placed()
    assert not placement.one_machine
    assert all(set(one) == {"CPU"} for group in placement.groups for one in group.bundles.values())
    assert placement.gateway_stays
    assert not placed(host="0.0.0.0").gateway_stays


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"redis_url": None}, "--redis-url names a server that all nodes reach"),
        ({"redis_url": "redis://:secret@127.0.0.1:6379/0"}, "cannot reach a server on loopback"),
        ({"internal_tls": "auto"}, "give a folder that all nodes have"),
        ({"insecure": False}, "--internal-tls encrypts that"),
        ({"encode_workers": 1}, "--encode"),
        ({"gpu_sharing": "turns"}, "--gpu-sharing"),
        ({"device": "cuda:1"}, "Ray chooses the GPU"),
    ],
)
def test_options_that_other_nodes_cannot_work_with_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadOptions, match=told) as refused:
        placed(**changes)
    assert "secret" not in str(refused.value)


def test_a_cluster_with_a_gpu_for_each_worker_computes_there() -> None:
    placement = placed(nodes=[replace(one, gpus=1.0) for one in NODES])
    assert placement.options.device == "cuda"
    assert all(one["GPU"] == 1.0 for group in placement.groups for one in group.bundles.values())
    assert placed(nodes=[replace(NODES[0], gpus=1.0), NODES[1]]).options.device == "cpu"
