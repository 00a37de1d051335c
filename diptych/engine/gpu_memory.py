"""Memory that a worker takes of its GPU, by use: measured where it is taken at the start, planned where not.

The plan is logged once the worker has taken its blocks, and its numbers add up to what it may take: a KV pool
has what the other uses leave of its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from diptych.engine.device import BYTES_A_GRAPH, CONTEXT_BYTES, FEW_BYTES

_MIB = 1 << 20


class GpuMemory:
    """Uses of the memory of one GPU in the order in which they came; on a CPU there are none."""

    def __init__(self, name: str, total: int, reserved: Callable[[], int]) -> None:
        """Count on the device `name`, of `total` bytes; `reserved` returns the bytes of all tensors now.

        On a CPU `total` is 0, and nothing is counted.
        """
        self._name, self._total, self._reserved = name, total, reserved
        self._measured: dict[str, int] = {}
        self._planned: dict[str, int] = {"CUDA context": CONTEXT_BYTES, "small numbers": FEW_BYTES}
        self._last = reserved() if total else 0

    @classmethod
    def of(cls, device: torch.device) -> GpuMemory:
        """Return the memory of `device`, of which nothing is taken yet."""
        if device.type != "cuda":
            return cls(str(device), 0, lambda: 0)

        def reserved() -> int:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            return int(torch.cuda.memory_reserved(device))

        return cls(str(device), int(torch.cuda.mem_get_info(device)[1]), reserved)

    def took(self, use: str) -> None:
        """Count what tensors have taken since the last call as `use`."""
        if self._total:
            now = self._reserved()
            self._measured[use] = self._measured.get(use, 0) + now - self._last
            self._last = now

    def plan(self, use: str, size: int) -> None:
        """Count `size` bytes that will be taken later, or outside torch."""
        if self._total and size:
            self._planned[use] = size

    def plan_graphs(self, count: int) -> None:
        """Count what so many recorded steps take outside torch."""
        self.plan("graphs", BYTES_A_GRAPH * count)

    @property
    def uses(self) -> Mapping[str, int]:
        """Bytes by use, in the order in which they came; planned ones last. Empty on a CPU."""
        return {**self._measured, **self._planned} if self._total else {}

    def describe(self, share: float | None) -> str | None:
        """Return the plan as a line for the log: each use, their sum, and what the worker may take, if a
        `share` bounds it. None on a CPU.
        """
        if not self._total:
            return None
        each = ", ".join(f"{use} {size // _MIB}" for use, size in self.uses.items() if size >= _MIB)
        bound = self._total if share is None else int(share * self._total)
        of = f"of {self._total // _MIB}" if share is None else f"of {bound // _MIB} ({share:g} of the GPU)"
        taken = sum(self.uses.values())
        over = "" if taken <= bound else f"; {-(-(taken - bound) // _MIB)} too many"
        return f"memory of {self._name} in MiB: {each}; together {taken // _MIB} {of}{over}"
