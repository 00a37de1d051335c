"""Placement of the programs on a Ray cluster: pure decisions, made before anything starts.

Workers that hand KV blocks off in place must share a machine: those of a group with strategy STRICT_PACK do.
Workers that copy blocks over the network may be anywhere: Ray spreads them over its nodes.

| transport | groups |
|---|---|
| auto | a decode worker and its prefill worker in one each; across groups blocks are copied |
| shared_memory, cuda_ipc | all workers of a model in one: any of them may hand off to any |
| tcp, gloo, nccl | all workers in one, spread |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

from diptych.cli.hosted_pairs import OFF
from diptych.cli.preflight import BadOptions
from diptych.cli.stack_options import AUTO_TLS, StackOptions
from diptych.cli.worker_specs import WorkerPlace, worker_places
from diptych.runtime.bind_address import is_loopback

LOCAL = "local"
"""Address that starts a cluster on this machine, which ends with the command."""
_ONE_HOST = ("shared_memory", "cuda_ipc")
_COPYING = ("tcp", "gloo", "nccl")
_PIN = 0.001
"""Share of a node's own resource `node:ADDRESS` that keeps an actor there."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster that is alive: its address, and what Ray may give out there."""

    ip: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True)
class Group:
    """A placement group: for each of its programs, by name, the resources that Ray keeps for it."""

    strategy: Literal["STRICT_PACK", "SPREAD"]
    bundles: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Placement:
    """Decision where the programs of a system may run.

    `options` are those of the system with the workers' threads decided. With `one_machine` all programs
    talk over loopback, on the node of the command; else workers listen on the address of their node.
    """

    options: StackOptions
    one_machine: bool
    groups: tuple[Group, ...]
    gateway_stays: bool
    """True if the gateway runs on the node of the command only: on loopback no other one reaches it."""


def place(options: StackOptions, address: str, nodes: Sequence[Node], here: str) -> Placement:
    """Decide where the programs may run.

    Args:
        address: that of the cluster, or LOCAL.
        nodes: those of the cluster that are alive.
        here: address of the node on which the command runs.

    Raises BadOptions where programs on other nodes could not work with these options.
    """
    if options.encode_workers:
        raise BadOptions("--encode: encode workers are not placed on a Ray cluster: leave it out with --ray")
    if options.gpu_sharing not in ("auto", OFF):
        raise BadOptions("--gpu-sharing: Ray gives each worker a process, and a GPU of its own")
    one_machine = address == LOCAL or options.redis_url is None
    if not one_machine or len(nodes) > 1:
        _check_several_nodes(options, nodes)
    pin = {f"node:{here}": _PIN}
    usable = [one for one in nodes if one.cpus > 0 and (one.ip == here or not one_machine)]
    if not usable:
        raise BadOptions("--ray: no node for the workers has CPUs to give out")
    groups = _groups(options)
    workers = [one for _, group in groups for one in group]
    device = _device(options, usable, len(workers))
    share = _cpu_share(groups, usable)
    threads = max(1, math.floor(share))
    chosen = replace(
        options,
        device=device,
        gpu_sharing=OFF,
        prefill_threads=options.prefill_threads or threads,
        decode_threads=options.decode_threads or threads,
        # Ray gives a worker a GPU of its own, all of it.
        gpu_memory_utilization=options.gpu_memory_utilization or (0.9 if device == "cuda" else None),
    )
    bundles = {
        one.name: {
            "CPU": _cpus(chosen, one, share),
            **({"GPU": 1.0} if device == "cuda" else {}),
            **(pin if one_machine else {}),
        }
        for one in workers
    }
    return Placement(
        chosen,
        one_machine,
        tuple(Group(strategy, {one.name: bundles[one.name] for one in group}) for strategy, group in groups),
        one_machine or is_loopback(options.host),
    )


def _check_several_nodes(options: StackOptions, nodes: Sequence[Node]) -> None:
    """Raise BadOptions for what programs on other nodes could not reach, read or be safe with."""
    if options.redis_url is None:
        raise BadOptions(
            f"--ray: the cluster has {len(nodes)} nodes, and the Valkey that would be started here serves "
            "this one only: --redis-url names a server that all nodes reach"
        )
    if len({one.ip for one in nodes}) > 1 and is_loopback(urlsplit(options.redis_url).hostname or ""):
        raise BadOptions("--redis-url: other nodes of the cluster cannot reach a server on loopback")
    if options.internal_tls == AUTO_TLS:
        raise BadOptions(
            "--internal-tls auto makes certificates on this machine only: give a folder that all nodes have"
        )
    if options.internal_tls is None and not options.insecure:
        raise BadOptions(
            "--ray: workers listen for other nodes: --internal-tls encrypts that, and --insecure allows it "
            "without TLS where the network itself is trusted"
        )


def _groups(options: StackOptions) -> list[tuple[Literal["STRICT_PACK", "SPREAD"], list[WorkerPlace]]]:
    """Return the workers that Ray places together, with the strategy of each group."""
    workers = worker_places(options, cores=1)
    if options.transport in _COPYING:
        return [("SPREAD", workers)]
    groups: dict[tuple[str, int], list[WorkerPlace]] = {}
    pairs = min(options.prefill_workers, options.decode_workers)
    for one in workers:
        number = int(one.name.rpartition("-")[2])
        model = str(one.model)
        groups.setdefault((model, 0 if options.transport in _ONE_HOST else number % pairs), []).append(one)
    return [("STRICT_PACK", group) for group in groups.values()]


def _cpu_share(groups: Sequence[tuple[str, Sequence[WorkerPlace]]], nodes: Sequence[Node]) -> float:
    """Return the CPUs of each worker where every node takes as many groups, or workers, as the others."""
    cpus = min(one.cpus for one in nodes)
    spread = groups[0][0] == "SPREAD"
    members = 1 if spread else max(len(group) for _, group in groups)
    units = len(groups[0][1]) if spread else len(groups)
    return cpus / (math.ceil(units / len(nodes)) * members)


def _cpus(options: StackOptions, worker: WorkerPlace, share: float) -> float:
    """Return the CPUs that Ray keeps for a worker: its threads, or less where there are too few for all."""
    threads = options.prefill_threads if worker.role == "prefill" else options.decode_threads
    return float(threads or 1) if share >= 1 else math.floor(share * 1000) / 1000


def _device(options: StackOptions, nodes: Sequence[Node], workers: int) -> str:
    """Return the device of the workers. Raises BadOptions for one that Ray would have to choose."""
    if options.device == "auto":
        return "cuda" if sum(one.gpus for one in nodes) >= workers else "cpu"
    if options.device not in ("cpu", "cuda"):
        raise BadOptions(f"--device {options.device}: with --ray, Ray chooses the GPU: --device cuda")
    return options.device
