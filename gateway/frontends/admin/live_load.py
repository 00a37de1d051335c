"""Load of a gateway's live requests: by phase and by tenant, and the tokens so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

from prometheus_client import Counter as PromCounter

from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.v1 import admin_pb2 as pb
from gateway.session.live_requests import LiveRequests
from gateway.session.states import State

MOST_TENANTS: Final = 100
# The furthest first.
_PHASES: Final[Mapping[State, str]] = {
    State.DECODING: "decode",
    State.PREFILLING: "prefill",
    State.ROUTING: "routing",
    State.QUEUED: "queued",
}


def add_load(message: pb.WatchLoadResponse, live: LiveRequests, metrics: GatewayMetrics) -> None:
    """Add phases, tenants and tokens to a message; a request that ends just now is in none of them."""
    phases: defaultdict[str, Counter[str]] = defaultdict(Counter)
    tokens: Counter[str] = Counter()
    for driver in live.drivers():
        states = {choice.state for choice in driver.state.choices}
        phase = next((name for state, name in _PHASES.items() if state in states), None)
        if phase is not None:
            phases[driver.job.tenant][phase] += 1
        tokens[driver.job.tenant] += driver.generated
    message.phases.CopyFrom(pb.PhaseLoad(**sum(phases.values(), Counter())))
    busiest = sorted(phases, key=lambda tenant: (-phases[tenant].total(), tenant))[:MOST_TENANTS]
    for tenant in busiest:
        message.tenants.add(
            tenant=tenant, phases=pb.PhaseLoad(**phases[tenant]), generated_tokens=tokens[tenant]
        )
    message.generated_tokens = _value(metrics.output_tokens) + tokens.total()
    message.prompt_tokens = _value(metrics.input_tokens)


def _value(counter: PromCounter) -> int:
    return int(next(iter(counter.collect())).samples[0].value)
