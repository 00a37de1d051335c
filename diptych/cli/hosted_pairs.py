"""Pairs of a prefill and a decode worker that one process hosts, so that both phases use one GPU at once.

Two processes on one GPU take turns whatever waits, and each holds the weights. `--gpu-sharing` says whether
workers on one device are hosted in pairs, and how a pair shares it (diptych/host).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from diptych.cli.child import Announcement, ChildSpec, Health, Slot, announced_by
from diptych.cli.expected_device import expects_gpu
from diptych.cli.stack_options import StackOptions
from diptych.host.flags import ENGINE_FIELDS, SEPARATOR, SHARING
from diptych.runtime.python_module import module_arguments, module_command

ROLE = "pair"
MODULE = "diptych.host"
OFF = "off"
BY_DEFAULT = OFF
"""Meaning of `auto`: two processes made the most tokens a second (docs/performance.md, "GPU")."""
_ENGINE_FLAGS = tuple(field.replace("_", "-") for field in ENGINE_FIELDS)
_GROUP_FLAGS = ("tensor-parallel", "pipeline-parallel", "sum-parts")
_OF_PROCESS = frozenset({"ready_fd", "death_fd"})
"""Slots that are the process's, and not its workers'."""


class BadSharing(ValueError):
    """Options that do not go with the chosen way of sharing a GPU."""


def sharing_of(options: StackOptions) -> str | None:
    """Return how pairs share their device; None where each worker has a process. Raises BadSharing."""
    chosen = options.gpu_sharing
    if chosen == "auto":
        pairs = BY_DEFAULT != OFF and expects_gpu(options.device) and why_no_pairs(options) is None
        return BY_DEFAULT if pairs else None
    if chosen == OFF:
        return None
    if re.fullmatch(SHARING, chosen) is None:
        raise BadSharing("--gpu-sharing: must be auto, off, turns, streams, partition or partition:N")
    if (why := why_no_pairs(options)) is not None:
        raise BadSharing(f"--gpu-sharing {chosen} hosts prefill and decode in one process: {why}")
    return chosen


def why_no_pairs(options: StackOptions) -> str | None:
    """Return why no two workers of this system can be hosted by one process; None if they can."""
    if options.auto_roles:
        return "a worker of a pair does not change its role (--auto-roles)"
    if options.kv_tier:
        return "tiers (--kv-tier) read blocks beside one stream of steps only"
    chosen: dict[str, dict[str, str]] = {"prefill": {}, "decode": {}}
    for role, flag, value in options.overrides:
        if role in chosen:
            chosen[role][flag] = value
    prefill, decode = chosen.values()
    for flag in (*_ENGINE_FLAGS, *_GROUP_FLAGS):
        if prefill.get(flag) != decode.get(flag):
            return f"--set gives each another --{flag}"
    if grouped := [flag for flag in _GROUP_FLAGS if decode.get(flag, "1") not in ("0", "1")]:
        return f"--{grouped[0]} takes processes of its own"
    return None


def pair_up(specs: Sequence[ChildSpec], sharing: str, options: StackOptions) -> list[ChildSpec]:
    """Return the processes of these workers: pairs of one model while there are two to pair, then the
    others.
    """
    decode = [one for one in specs if one.role == "decode"]
    pairs: list[ChildSpec] = []
    rest = list(specs)
    for prefill in [one for one in specs if one.role == "prefill"]:
        partner = next((one for one in decode if one.model == prefill.model), None)
        if partner is None:
            continue
        decode.remove(partner)
        rest.remove(prefill)
        rest.remove(partner)
        pairs.append(_pair(f"{ROLE}-{len(pairs)}", prefill, partner, sharing, options))
    return [*pairs, *rest]


def _pair(name: str, prefill: ChildSpec, decode: ChildSpec, sharing: str, options: StackOptions) -> ChildSpec:
    hosts = tuple(replace(one, roles={}) for one in (prefill, decode))
    argv: list[str | Slot] = [*module_command(MODULE), "--gpu-sharing", sharing]
    argv += ["--log-level", options.log_level]
    if options.config_digest is not None:
        argv += ["--config-digest", options.config_digest]
    argv += ["--worker-id", Slot("worker_id"), "--ready-fd", Slot("ready_fd"), "--death-fd", Slot("death_fd")]
    for one in hosts:
        argv += [SEPARATOR, one.role, *_flags_of(one)]
    return ChildSpec(
        name=name,
        role=ROLE,
        argv=tuple(argv),
        env=decode.env,
        values=decode.values,
        model=decode.model,
        hosts=hosts,
        health=partial(_both_healthy, {one.role: one.health for one in hosts if one.health is not None}),
    )


def _flags_of(worker: ChildSpec) -> list[str | Slot]:
    """Return the flags of a hosted worker: its id is its own, the pipes are the process's."""
    words = list(module_arguments(worker.argv))
    flags: list[str | Slot] = []
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if isinstance(flag, Slot):
            if flag.name not in _OF_PROCESS:
                flags.append(Slot(f"{worker.role}_id") if flag.name == "worker_id" else flag)
        elif not (isinstance(value, Slot) and value.name in _OF_PROCESS):
            flags.append(flag)
    return flags


async def _both_healthy(probes: Mapping[str, Health], announced: Announcement) -> bool:
    """Return whether both workers of a process are alive by their own /health."""
    return all([await probe(announced_by(announced, role)) for role, probe in probes.items()])
