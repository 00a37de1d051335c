"""Either side of a pull is killed or stopped in each of its states: no wrong token, and all blocks back.

    python -m tests.faults.pull_kills [--times 5] [--state P1 …] [--victim prefill …] [--output FILE]

The prefill workers forget what they have cached, the decode workers do not: the next prompts pull. The
process that reaches the state is stopped there. One that is killed gets SIGKILL, one that is stopped goes on
after `STOPPED_S`. Answers must equal those without faults.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from diptych.client import CallFailed
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end.stack import Stack
from tests.faults.conftest import Breakable
from tests.faults.failpoints import kill
from tests.faults.figures import Figure, Result, add_output, count, tell
from tests.faults.requests import ask, check_same
from tests.faults.states import State, Victim
from tests.faults.system import PAIRS, breakable_system, settle, signal_if_alive

FLAGS = (*PAIRS, "--transport", "tcp", "--set", "prefill.pull-prefixes=always")
"""The tiny model computes a block faster than a socket brings it."""
MIX = ("greedy", "seeded", "two choices", "logprobs")
STOPPED_S = 4.0
STATES = (
    State("P1", "pull asked", "prefill.pull", "prefill"),
    State("P2", "blocks on their way", "decode.pull", "decode", after=2),
    State("P3", "a block has arrived", "prefill.pulled", "prefill", after=1),
)
VICTIMS: tuple[Victim, ...] = ("prefill", "decode")
WAYS = ("killed", "stopped")


def strike(system: Breakable, state: State, victim: Victim, way: str) -> None:
    """Hit one process in the middle of a pull. Raises AssertionError for what is wrong afterwards."""
    expected = ask(system.address, MIX)
    system.stack.wait_idle(10)
    flush_scratch(system.stack)
    system.armory.arm(state.failpoint, "freeze", after=state.after)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address, MIX)
        stopped = system.armory.wait_taken(state.failpoint)
        target = stopped if state.role == victim else _first(system.stack, victim)
        if way == "killed":
            kill(target)
        else:
            signal_if_alive(target, signal.SIGSTOP)
            if stopped != target:
                signal_if_alive(stopped, signal.SIGCONT)
            time.sleep(STOPPED_S)
        for pid in (target, stopped):
            signal_if_alive(pid, signal.SIGCONT)
        answers = asked.result()
    check_same(expected, answers)
    settle(system.stack)
    check_same(expected, ask(system.address, MIX))
    system.stack.wait_idle(10)


def flush_scratch(stack: Stack) -> None:
    """Let the prefill workers alone forget what they have cached."""
    with grpc.insecure_channel(stack.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for worker in stack.account["prefill"]:
            stub.FlushPrefixCache(pb.FlushPrefixCacheRequest(worker_id=worker["worker_id"]), timeout=10)


def _first(stack: Stack, role: Victim) -> int:
    return int(next(worker["pid"] for worker in stack.account[role] if worker.get("pid")))


def run(system: Breakable, plan: Sequence[tuple[State, Victim, str]]) -> Result:
    """Carry out the plan, and print each of its lines."""
    failures = []
    for state, victim, way in plan:
        began, wrong = time.monotonic(), ""
        try:
            strike(system, state, victim, way)
        except (AssertionError, CallFailed) as error:
            wrong = str(error).partition("\n")[0][:300]
            failures.append(f"{state.name} {victim} {way}: {wrong}")
            settle(system.stack)
        took = time.monotonic() - began
        print(f"{state.name} {victim} {way}: {wrong or 'ok'} in {took:.1f} s", flush=True)
    figures = [
        Figure("processes killed or stopped in a pull", str(len(plan))),
        count("times that an answer or the state of the system was wrong", len(failures), 0),
    ]
    return Result("Kills in pulls", figures, failures=failures)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit status is 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.pull_kills", description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="for each state, victim and way")
    parser.add_argument("--state", nargs="*", default=[state.name for state in STATES])
    parser.add_argument("--victim", nargs="*", default=list(VICTIMS))
    add_output(parser)
    options = parser.parse_args(argv)
    states = [state for state in STATES if state.name in options.state]
    plan = [one[1:] for one in itertools.product(range(options.times), states, options.victim, WAYS)]
    with breakable_system(*FLAGS) as (system, _):
        return tell(run(system, plan), options.output)


if __name__ == "__main__":
    sys.exit(main())
