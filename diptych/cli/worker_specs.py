"""Flags of the workers of `diptych up`, in each of the two roles that a worker may have.

Memory for both roles is planned here, before anything starts: every worker but one may come to own a pool
of KV blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diptych.cli.child import Slot
from diptych.cli.hosted_pairs import sharing_of
from diptych.cli.stack_options import StackOptions
from diptych.runtime.discovery.records import Role
from diptych.runtime.model_images import model_images
from diptych.runtime.settings import StartupError, resolve_model
from gateway.model.named_models import NamedModel, parse_models

_GPU_UTILIZATION = 0.9


@dataclass(frozen=True)
class ThreadPlan:
    """Threads of each prefill and each decode worker, in the order of their names."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    def homes(self, cores: int) -> tuple[tuple[range, ...], tuple[range, ...]] | None:
        """Return the home cores of each worker, to be lent between them; None when there are too few."""
        ends = list(itertools.accumulate((*self.prefill, *self.decode)))
        if ends[-1] > cores:
            return None
        homes = tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))
        return homes[: len(self.prefill)], homes[len(self.prefill) :]


def split_cores(cores: int, prefill_workers: int, decode_workers: int) -> ThreadPlan:
    """Deal the cores out, one after the other, prefill first (it is bound by arithmetic); at least one each.

    Workers that shared cores would wait for one another inside every layer: their threads meet at
    barriers, and a barrier is as late as its latest thread.
    """
    workers = prefill_workers + decode_workers
    shares = [max(1, cores // workers + (1 if index < cores % workers else 0)) for index in range(workers)]
    return ThreadPlan(tuple(shares[:prefill_workers]), tuple(shares[prefill_workers:]))


@dataclass(frozen=True)
class WorkerPlace:
    """A worker at the start: its name, its role, and what it has in either role."""

    name: str
    role: Role
    threads: int
    home: range | None
    cores: int
    model: NamedModel
    models: int = 1
    """Number of models of this machine."""
    rank: int = 0
    """Number among all workers: each publishes KV events at its own endpoint, as a decode worker."""

    def flags(self, role: Role, options: StackOptions) -> dict[str, object]:
        """Return the flags that set a program of `role` in this place apart from others of its kind."""
        threads = options.prefill_threads if role == "prefill" else options.decode_threads
        own: dict[str, object] = {"threads": threads or self.threads, **_share(self.home, self.cores)}
        if role == "prefill":
            return {**own, "prefill-chunk": options.prefill_chunk, "kv-tier": options.kv_tier}
        return {
            **own,
            "speculative-tokens": options.speculative_tokens,
            "speculative-tree": options.speculative_tree,
            "kv-memory-mib": options.kv_memory_mib,
            "kv-blocks": options.kv_blocks,
            "kv-tier": options.kv_tier,
            "kv-events": options.kv_events,
            "kv-events-topic": options.kv_events_topic,
            "kv-events-rank": self.rank if options.kv_events else None,
            "gpu-memory-utilization": options.gpu_memory_utilization or _gpu_share(options, self.models),
        }


def worker_places(options: StackOptions, cores: int, first_rank: int = 0) -> list[WorkerPlace]:
    """Return the workers in the order of their start, decode first; `cores` are dealt out to them.

    With several models each has workers of both roles; their numbers go on from model to model.
    `first_rank` is the number of workers that there are already.
    """
    models = parse_models(options.model)
    plan = split_cores(cores, options.prefill_workers * len(models), options.decode_workers * len(models))
    # A chosen number of threads is that number: no core is lent.
    chosen = options.prefill_threads or options.decode_threads
    homes = None if chosen else plan.homes(cores)
    of_prefill, of_decode = homes or (None, None)

    def places(
        role: Role, threads: Sequence[int], homes: tuple[range, ...] | None, first_rank: int
    ) -> Iterator[WorkerPlace]:
        for index, count in enumerate(threads):
            model = models[index * len(models) // len(threads)]
            home = None if homes is None else homes[index]
            rank = first_rank + index
            yield WorkerPlace(f"{role}-{index}", role, count, home, cores, model, len(models), rank)

    decode = places("decode", plan.decode, of_decode, first_rank)
    return [*decode, *places("prefill", plan.prefill, of_prefill, first_rank + len(plan.decode))]


def encoded_models(options: StackOptions) -> list[NamedModel]:
    """Return the model of each encode worker: of several models only those with images have some."""
    models = parse_models(options.model)
    encoded = [one for one in models if len(models) == 1 or reads_images(one.path)]
    return [model for model in encoded for _ in range(options.encode_workers)]


def reads_images(model: str) -> bool:
    """Return whether a model takes images; False for one that cannot be read."""
    try:
        return model_images(resolve_model(model)) is not None
    except (StartupError, ValueError):
        return False  # its other workers say what is wrong with it


def encode_threads(options: StackOptions, cores: int) -> int:
    """Return the threads of each encode worker: its share of the cores, none of which is lent."""
    workers = options.prefill_workers + options.decode_workers + options.encode_workers
    return options.encode_threads or max(1, cores // (workers * len(parse_models(options.model))))


def role_changes(options: StackOptions) -> str:
    """Return the devices on which workers may change their role: "any" where their memory was planned so.

    On a GPU a worker takes its part of the memory when it starts, and a prefill worker's is small.
    """
    return "any" if options.auto_roles else "cpu"


def _gpu_share(options: StackOptions, models: int = 1) -> float | None:
    """Return the share of a GPU that each decode worker takes, when all workers of this machine are on one.

    A prefill worker has weights and one step's numbers but no blocks: it counts as a quarter, unless it may
    become a decode worker. To put workers on GPUs of their own, give what each may take.
    """
    if options.device == "cpu":
        return None
    alone = options.prefill_workers
    if sharing_of(options) is not None:  # a decode worker's process holds its weights
        alone -= min(options.prefill_workers, options.decode_workers)
    prefill = alone / (1 if options.auto_roles else 4)
    return round(_GPU_UTILIZATION / (options.decode_workers + prefill) / models, 3)


def _share(home: range | None, cores: int) -> Mapping[str, object]:
    """Return the flags by which a worker lends its idle cores and borrows those of others."""
    if home is None:
        return {}
    return {"cores-fd": Slot("cores_fd"), "home-cores": ",".join(map(str, home)), "machine-cores": cores}
