"""Groups of torch.distributed, made from the backends' own classes: torch has one default group a process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d


def gloo_group(store: c10d.Store, rank: int, ranks: int, host: str, timeout_s: float) -> Any:
    """Return a Gloo group of `ranks`, which meet at `store` and listen at `host`. Raises RuntimeError."""
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return c10d.ProcessGroupGloo(store, rank, ranks, options)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, which torch may go on with a stack."""
    return str(error).strip().split("\n", 1)[0]
