"""What is offered to a decode process after ranks there were not reached: the next way, then whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import whole_share
from kvtransfer.drivers.reach import Reach
from kvtransfer.transports import cuda_ipc, tcp
from kvtransfer.transports.base import CPU, Welcome
from kvtransfer.transports.shared_memory import ON_GPU
from tests.kvtransfer.conftest import LAYOUT

HERE, THERE = ("host:1", 7), ("host:1", 8)
ALL = [ON_GPU, cuda_ipc.NAME, tcp.NAME]
WHOLE = whole_share(LAYOUT)
HALVES: Holders = tuple(
    (replace(WHOLE, layers=layers),) for layers in (range(1), range(1, WHOLE.layers.stop))
)


@dataclass
class Group:
    """The other ranks of a worker: what is asked of them here is what they were made with."""

    holders: Holders | None
    devices: Sequence[str] = ("gpu 0", "gpu 1")
    pids: Sequence[int] = (11,)

    async def map_pool(self, memory: KVMemory, welcome: Welcome, tokens: Sequence[bytes]) -> None:
        raise NotImplementedError


def test_ranks_apart_fall_back_to_copies_sockets_and_whole_blocks() -> None:
    reach = Reach(ALL, LAYOUT, CPU, Group(HALVES))
    assert (reach.apart, reach.holder_devices) == (True, ("gpu 0", "gpu 1"))
    assert (reach.transports_to(HERE), reach.holders_for(HERE)) == (ALL, HALVES)
    assert reach.fall_back(HERE, ON_GPU) == "in copies"
    assert reach.transports_to(HERE) == ALL[1:]
    assert reach.fall_back(HERE, cuda_ipc.NAME) == "by tcp"
    assert (reach.transports_to(HERE), reach.holders_for(HERE)) == ([tcp.NAME], HALVES)
    assert reach.fall_back(HERE, tcp.NAME) == "whole"
    assert (reach.transports_to(HERE), reach.holders_for(HERE)) == ([tcp.NAME], ())
    assert reach.fall_back(HERE, tcp.NAME) is None, "there is no other way"
    # The next process at this address is another one.
    assert (reach.transports_to(THERE), reach.holders_for(THERE)) == (ALL, HALVES)


@pytest.mark.parametrize("transports", [[ON_GPU], [cuda_ipc.NAME]])
def test_without_another_transport_there_is_no_other_way(transports: list[str]) -> None:
    assert Reach(transports, LAYOUT, CPU, Group(HALVES)).fall_back(HERE, transports[0]) is None


@pytest.mark.parametrize("ranks", [None, Group(None)])
def test_ranks_with_one_memory_go_whole_by_any_transport(ranks: Group | None) -> None:
    reach = Reach(ALL, LAYOUT, torch.device("cpu"), ranks)
    assert (reach.apart, reach.holder_devices) == (False, [""])
    assert reach.holders_for(HERE) == ((WHOLE,),)
    assert reach.fall_back(HERE, tcp.NAME) == "whole"
    assert (reach.transports_to(HERE), reach.holders_for(HERE)) == (ALL, ())


def test_blocks_with_a_draft_go_whole_and_by_tcp_alone_from_ranks_apart() -> None:
    drafted = replace(LAYOUT, draft=LAYOUT)
    reach = Reach(ALL, drafted, CPU, Group(HALVES))
    assert (reach.transports_to(HERE), reach.holders_for(HERE)) == ([tcp.NAME], ())
    assert Reach(ALL, drafted, CPU, None).transports_to(HERE) == ALL
