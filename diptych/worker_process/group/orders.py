"""Orders of rank 0 to another rank, over two pipes.

plans    StepPlan; where torch computes, answered with an empty message when the rank has written its share
control  StartRank first, answered with RankReady or RankFailed; then MapFile, RegisterPool and DropMemory,
         of which all but the last are answered with None, or with RankFailed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.engine.dtype import Precision
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel_model import Dealing
from kvtransfer.transports.base import Welcome


@dataclass(frozen=True)
class StartRank:
    """Share of the model that a rank computes, and the group that it joins."""

    number: int
    """Number of the process in its group (diptych/engine/parallel/stages.py)."""
    grid: Grid
    model: Path
    precision: Precision
    native: bool
    """True where the native step computes, False where torch does."""
    dealing: Dealing
    max_context: int | None
    threads: int
    device: str
    store_port: int
    """Port of the group's store on the loopback."""


@dataclass(frozen=True)
class RankReady:
    """Answer of a rank that has loaded its weights."""

    weight_bytes: int


@dataclass(frozen=True)
class RankFailed:
    """Answer of a rank that could not do what was asked."""

    why: str


@dataclass(frozen=True)
class MapFile:
    """Order to map the file whose descriptor follows as memory `number`."""

    number: int
    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True)
class RegisterPool:
    """Order to register with a decode worker, and to map its pool as memory `number`."""

    number: int
    welcome: Welcome


@dataclass(frozen=True)
class DropMemory:
    """Order to unmap a memory that no later plan names."""

    number: int


Order = StartRank | MapFile | RegisterPool | DropMemory
