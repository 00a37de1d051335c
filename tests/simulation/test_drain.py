"""The drain of a prefill worker, beside the only decode worker, which is healthy."""

from __future__ import annotations

from collections import Counter

from tests.simulation.model import FIRST_TOKEN, TOKENS, RequestSampling
from tests.simulation.run import simulate
from tests.simulation.scenario import DecodeShape, Fault, RequestPlan, Scenario

NETWORKS = range(0, 60, 2)


def scenario(network: int) -> Scenario:
    prompts = (tuple(FIRST_TOKEN + (7 * n + i) % TOKENS for i in range(24)) for n in range(4))
    requests = tuple(
        RequestPlan(f"r{n}", 0.5 + 0.001 * n, 0, prompt, RequestSampling(0.0, n, 0.0), 4, cached=False)
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
        requests=requests,
        faults=(Fault(0.55, "drain", ("p0",)),),
    )


def test_requests_of_a_draining_prefill_worker_are_retried() -> None:
    ends: Counter[str] = Counter()
    retries = 0
    for network in NETWORKS:
        outcome = simulate(scenario(network))
        assert not outcome.violation
        ends.update(outcome.ends)
        retries += outcome.retries.total()
    assert ends == {"ok": 4 * len(NETWORKS)}
    assert retries > 0, "the drain met no request"
