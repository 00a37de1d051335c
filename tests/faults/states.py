"""The states of a request's way through the system, and where a process can be stopped in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["gateway", "prefill", "decode", "encode"]
Victim = Role | Literal["redis", "pair", "all prefill", "all decode", "all encode"]
VICTIMS: tuple[Victim, ...] = ("gateway", "prefill", "decode", "redis", "pair", "all prefill", "all decode")
"""Processes to kill. The last three are several in one moment: a pair is a prefill and a decode worker that
have requests."""


@dataclass(frozen=True)
class State:
    """`failpoint` is passed by the process of that `role` whenever a request enters the state."""

    name: str
    what: str
    failpoint: str
    role: Role
    after: int = 0
    prompt_tokens: int = 100
    """Length of the prompts that are asked to bring a request into the state."""


STATES = (
    State("S0", "admitted", "gateway.admitted", "gateway", after=1),
    State("S1", "queued at prefill", "prefill.queued", "prefill"),
    State("S2", "grant asked", "prefill.asked", "prefill"),
    State("S3", "granted", "prefill.granted", "prefill"),
    State("S4", "computing and pushing", "prefill.chunk", "prefill", after=1),
    State("S5", "about to commit", "prefill.before_commit", "prefill"),
    State("S6", "verified", "decode.verified", "decode"),
    State("S7", "acknowledged", "prefill.committed", "prefill"),
    State("S8", "decoding", "decode.step", "decode", after=12),
    State("S9", "finishing", "decode.finishing", "decode"),
)
LOCAL_STATES = (
    State("L1", "attached, local", "decode.attached", "decode"),
    State("L2", "granted to itself", "decode.local_granted", "decode"),
    State("L3", "computing a local chunk", "decode.local_chunk", "decode", prompt_tokens=180),
    State("L4", "about to commit locally", "decode.local_commit", "decode"),
    State("L5", "decoding", "decode.step", "decode", after=12),
)
"""States of a request whose decode worker computes the prompt itself. Without a neighbour it computes up to
`LocalBounds.idle_chunk` tokens at once, so that only a longer prompt is sure to be cut."""
