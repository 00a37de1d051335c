"""A prefill and a decode worker in one process: what is killed is always both, and every stream goes on."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from diptych.client import AsyncClient
from diptych.client.failure import read_failure
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end.test_role_changes import greedy, stream
from tests.faults import kill_matrix
from tests.faults.conftest import Breakable, breakable
from tests.faults.states import STATES, Victim
from tests.faults.stopped_writer import stop_a_writer
from tests.faults.system import SETTLED_WITHIN_S, eventually, settle

ONE_PROCESS = ("--device", "cpu", "--gpu-sharing", "turns")
FEW: list[tuple[str, Victim]] = [("S4", "prefill"), ("S8", "decode")]
MORE: list[tuple[str, Victim]] = [
    *((state.name, state.role) for state in STATES if state.role != "gateway"),
    ("S4", "all prefill"),
]
"""The process that is stopped is the victim: one that hosts both cannot be asked for figures meanwhile."""


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Breakable]:
    """Start a system whose one pair is hosted by one process."""
    yield from breakable(tmp_path_factory, tiny, *ONE_PROCESS)


@pytest.fixture(scope="module")
def two_pairs(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Breakable]:
    """Start a system of two such processes: each prefill worker writes for both decode workers."""
    flags = ("--prefill-workers", "2", "--decode-workers", "2")
    yield from breakable(tmp_path_factory, tiny, *ONE_PROCESS, *flags)


def handoffs(system: Breakable, index: int, transport: str) -> float:
    """Count the handoffs that a decode worker took by this transport."""
    port = system.stack.account["decode"][index]["http_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    name = f'diptych_kv_transfer_duration_seconds_count{{transport="{transport}"}}'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def answers_of(system: Breakable, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy answers to all prompts, asked at once."""
    async with AsyncClient(system.address) as client:
        return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))


def test_text_of_a_hosted_pair_equals_transformers_and_no_byte_is_moved(
    hosted: Breakable, tiny: Path
) -> None:
    prompts = [list(range(20 + seed, 20 + seed + length)) for seed, length in enumerate((1, 40, 100, 200))]
    account = hosted.stack.account
    assert account["prefill"][0]["pid"] == account["decode"][0]["pid"]
    assert account["prefill"][0]["worker_id"] != account["decode"][0]["worker_id"]
    answers = asyncio.run(answers_of(hosted, prompts))
    right = [greedy(tiny, prompt) for prompt in prompts]
    assert answers == right
    assert right[1] != right[2], "the check could not fail"
    assert handoffs(hosted, 0, "in_process") >= len(prompts)
    assert handoffs(hosted, 0, "shared_memory") == 0


def test_no_worker_of_a_pair_changes_its_role(hosted: Breakable) -> None:
    worker_id = hosted.stack.account["decode"][0]["worker_id"]
    with grpc.insecure_channel(hosted.stack.admin_address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        request = pb.ChangeWorkerRoleRequest(worker_id=worker_id, role=pb.WORKER_ROLE_PREFILL)
        with pytest.raises(grpc.RpcError) as failure:
            admin.ChangeWorkerRole(request, timeout=30)
    assert read_failure(failure.value).reason == "ROLE_CHANGE_REFUSED"


def test_both_workers_start_again_where_one_is_drained(hosted: Breakable) -> None:
    before = hosted.stack.account
    with grpc.insecure_channel(hosted.stack.admin_address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        admin.DrainWorker(pb.DrainWorkerRequest(worker_id=before["prefill"][0]["worker_id"]), timeout=30)
    settle_after(hosted, int(before["decode"][0]["pid"]))
    after = hosted.stack.account
    assert after["prefill"][0]["pid"] == after["decode"][0]["pid"] != before["decode"][0]["pid"]


def settle_after(system: Breakable, pid: int) -> None:
    """Wait until the process `pid` has a successor that serves."""
    eventually(
        lambda: system.stack.account["decode"][0].get("pid") not in (None, pid),
        SETTLED_WITHIN_S,
        "a successor",
    )
    settle(system.stack)


def check(system: Breakable, tiny: Path, cells: list[tuple[str, Victim]]) -> None:
    states = {state.name: state for state in STATES}
    matrix = kill_matrix.run(system, tiny, [(states[name], victim) for name, victim in cells])
    assert len(matrix.cells) == len(set(cells))
    assert not [one for one in matrix.failures if "clean after" not in one]


def test_streams_go_on_after_the_only_hosting_process_was_killed(hosted: Breakable, tiny: Path) -> None:
    check(hosted, tiny, [("S8", "decode")])


def test_streams_go_on_after_a_fault_of_a_prefill_kernel(hosted: Breakable, tiny: Path) -> None:
    """Fault in a prompt's step beside streams: the process that computes both phases ends itself."""
    before = int(hosted.stack.account["decode"][0]["pid"])
    prompts = [list(range(10 + seed, 10 + seed + 90)) for seed in range(7)]
    expected = [greedy(tiny, prompt) for prompt in prompts]
    hosted.armory.arm("prefill.device_fault", "fail", after=4)
    answers = asyncio.run(answers_of(hosted, prompts))
    assert hosted.armory.taken("prefill.device_fault") == before, "the check could not fail"
    assert answers == expected
    settle_after(hosted, before)
    assert "the GPU is lost to a fault of a kernel: this process ends" in hosted.stack.log.read_text()


@pytest.mark.full
@pytest.mark.parametrize("cells", [FEW, MORE], ids=["few", "more"])
def test_no_token_is_lost_when_a_hosting_process_is_killed(
    two_pairs: Breakable, tiny: Path, cells: list[tuple[str, Victim]]
) -> None:
    check(two_pairs, tiny, cells)


@pytest.mark.full
def test_hosting_process_that_hangs_with_a_grant_is_killed_by_another(two_pairs: Breakable) -> None:
    """Stop a process whose prefill worker writes for the other pair's decode worker, in one of some tries."""
    assert any(stop_a_writer(two_pairs, stopped_s=6.0) for _ in range(4))


def test_phases_that_take_turns_give_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, tiny: Path
) -> None:
    """Compute with the torch step, which lends no cores: on a CPU it takes turns as on a GPU."""
    torch_steps = ("--set", "prefill.backend=torch", "--set", "decode.backend=torch")
    for system in breakable(tmp_path_factory, tiny, *ONE_PROCESS, *torch_steps):
        prompts = [list(range(20 + seed, 20 + seed + 90)) for seed in range(4)]
        assert asyncio.run(answers_of(system, prompts)) == [greedy(tiny, prompt) for prompt in prompts]
        assert "computes both phases, by turns" in system.stack.log.read_text()
