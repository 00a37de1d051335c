"""A prefill worker that leaves costs no request its decode worker, which is healthy and the only one."""

from __future__ import annotations

from collections import Counter

from tests.simulation.model import FIRST_TOKEN, TOKENS, Draws
from tests.simulation.run import simulate
from tests.simulation.scenario import Ask, DecodeShape, Fault, Scenario

NETWORKS = range(0, 60, 2)


def scenario(network: int) -> Scenario:
    prompts = (tuple(FIRST_TOKEN + (7 * n + i) % TOKENS for i in range(24)) for n in range(4))
    asks = tuple(
        Ask(f"r{n}", 0.5 + 0.001 * n, 0, prompt, Draws(0.0, n, 0.0), 4, cached=False)
        for n, prompt in enumerate(prompts)
    )
    return Scenario(
        network=network,
        gateways=1,
        prefills=2,
        decodes=(DecodeShape("shared_memory", 64, 8),),
        chunk=4,
        max_inflight=16,
        max_queued_tokens=1000,
        step_s=0.06,
        asks=asks,
        faults=(Fault(0.55, "drain", ("p0",)),),
    )


def test_a_drained_workers_requests_continue_on_others() -> None:
    ends: Counter[str] = Counter()
    retries = 0
    for network in NETWORKS:
        outcome = simulate(scenario(network))
        assert not outcome.violation
        ends.update(outcome.ends)
        retries += outcome.retries.total()
    assert ends == {"ok": 4 * len(NETWORKS)}
    assert retries > 0, "nothing was in the way of the drain"
