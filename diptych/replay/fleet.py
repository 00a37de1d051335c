"""The fleet of a replay, and the service level that its answers are measured by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from decode_worker.local_schedule import LocalBounds
from diptych.bench.datasets.traces import MOONCAKE_BLOCK
from diptych.replay.prefix_index import DELAY_S
from diptych.replay.routing import Routing
from diptych.replay.step_times import StepTimes

BLOCK_SIZE = 16
"""Tokens of a block."""
CHUNK_TOKENS = MOONCAKE_BLOCK
"""Tokens of a chunk of a prefix, which is what traces know of prompts."""


@dataclass(frozen=True)
class ReplayFleet:
    """Workers of a replay. All of one role are alike."""

    prefill: int
    decode: int
    times: StepTimes
    blocks: int
    """Blocks of one decode worker's pool."""
    max_tokens: int
    """Prompt and answer of one request."""
    max_batch: int = 64
    prefill_chunk: int = 2048
    prefill_enough: int | None = None
    """Tokens of a step of prompts from which on no further prompt joins it; None: a full step."""
    local: LocalBounds | None = None
    """Prompts that decode workers compute themselves where that is sooner; None: none."""
    routing: Routing = Routing.COST
    most_steps: int = 1 << 30
    """Decode steps of one event, see `SimulatedDecodeWorker`."""
    index_delay_s: float = DELAY_S

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True)
class ServiceGoal:
    """Seconds that an answer may take: to its first token, and between tokens on average."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
