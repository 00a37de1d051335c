"""Workers whose second rank has a memory of its own, one of which dies or stops in a state of the handoff.

Blocks go from rank to rank. Where a rank is stopped, its process and what it has received stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.end_to_end import tiny_model
from tests.end_to_end.rank_hosts import children, serving_across_hosts
from tests.end_to_end.rank_processes import processes
from tests.faults.conftest import Breakable
from tests.faults.failpoints import Armory, kill
from tests.faults.group_deaths import STATES, kill_in_state, stop_in_step
from tests.faults.requests import ask, check_same
from tests.faults.system import alive, eventually, settle

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
BETWEEN_SHARES = "handoff.corrupt_push"
"""Failpoint that a prefill rank reaches, whichever comes first, when it is about to send a share."""


class Hosts(Breakable):
    """A system whose workers have a rank each beside `diptych up`."""

    parents: dict[str, int]

    def ranks(self, role: str) -> list[int]:
        """Return the processes of a worker, rank 0 first."""
        return [*processes(self.stack, role), *children(self.parents[role])]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two ranks a worker, with uneven heads."""
    folder = tmp_path_factory.mktemp("hosts")
    odd = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    model, two = tiny_model.write(folder / "model", **odd), {"tensor-parallel": 2}
    armory = Armory(tmp_path_factory.mktemp("failpoints"))
    env = {**armory.environment, "DIPTYCH_WORKER_WAIT_TIMEOUT": "500"}
    flags = ("--model-name", "tiny")
    with serving_across_hosts(model, two, two, folder, *flags, env=env) as (stack, parents):
        made = Hosts(stack, armory)
        object.__setattr__(made, "parents", dict(zip(("prefill", "decode"), parents, strict=True)))
        yield made


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("state", STATES, ids=[where for _, where, _ in STATES])
def test_streams_outlive_a_rank(hosts: Hosts, state: tuple[str, str, int], victim: int) -> None:
    kill_in_state(hosts, hosts.ranks, state, victim, gone_s=60)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_outlive_a_rank_that_stops(hosts: Hosts, role: str) -> None:
    """Shares of that rank neither leave nor are taken: the step is late, or blocks stay unacknowledged."""
    stop_in_step(hosts, hosts.ranks, role)


@pytest.mark.parametrize("after", [3, 4, 5, 6])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_streams_outlive_a_rank_between_two_shares(hosts: Hosts, how: str, after: int) -> None:
    """A rank that stays stopped holds its group for no longer than a network that fell silent would."""
    length = 200 + 2 * after + (how == "stopped")
    hosts.armory.arm(BETWEEN_SHARES, "freeze", after=after)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, hosts.address, ["greedy"], length=length)
        stopped = hosts.armory.wait_taken(BETWEEN_SHARES)
        ranks = hosts.ranks("prefill")
        assert stopped in ranks
        if how == "killed":
            kill(stopped)
        eventually(lambda: not alive(ranks[:1]), 90, "the group is over")
        with contextlib.suppress(ProcessLookupError):
            kill(stopped)
        answers = asked.result()
    settle(hosts.stack)
    check_same(ask(hosts.address, ["greedy"], length=length), answers)


@pytest.mark.parametrize("name", ["handoff.corrupt_push", "handoff.swap_push", "handoff.replay_push"])
def test_damage_between_ranks_costs_the_attempt_alone(hosts: Hosts, name: str) -> None:
    """A flipped bit, another index or an earlier generation of one share."""
    length = 140 + len(name)
    hosts.armory.arm(name, "fail", after=1)
    answers = ask(hosts.address, ["greedy"], length=length)
    assert hosts.armory.taken(name)
    check_same(ask(hosts.address, ["greedy"], length=length), answers)
    hosts.stack.wait_idle(120)
