"""How many compute threads each worker gets."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class ThreadPlan:
    """Threads of each prefill and each decode worker, in the order of their names."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    def homes(self, cores: int) -> "tuple[tuple[range, ...], tuple[range, ...]] | None":
        """Numbers of the home cores of each worker, to be lent between them; None when there are too few."""
        ends = list(itertools.accumulate((*self.prefill, *self.decode)))
        if ends[-1] > cores:
            return None
        homes = tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))
        return homes[: len(self.prefill)], homes[len(self.prefill) :]


def split_cores(cores: int, prefill_workers: int, decode_workers: int) -> ThreadPlan:
    """Deals the cores out, one after the other, prefill first (it is bound by arithmetic); at least one each.

    Workers that shared cores would wait for one another inside every layer: their threads meet at
    barriers, and a barrier is as late as its latest thread.
    """
    workers = prefill_workers + decode_workers
    shares = [max(1, cores // workers + (1 if index < cores % workers else 0)) for index in range(workers)]
    return ThreadPlan(tuple(shares[:prefill_workers]), tuple(shares[prefill_workers:]))
