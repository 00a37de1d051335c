"""Screen of `diptych top`: what one message of WatchLoad and the one before it say, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.runtime.message_json import message_members
from diptych.v1 import admin_pb2 as pb

_BAR: Final = 20  # characters
_ROLES: Final = {
    pb.WORKER_ROLE_PREFILL: "prefill",
    pb.WORKER_ROLE_DECODE: "decode",
    pb.WORKER_ROLE_ENCODE: "encode",
}
_STATES: Final = {
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_CONNECTING: "connecting",
    pb.WORKER_STATE_DRAINING: "draining",
    pb.WORKER_STATE_INCOMPATIBLE: "incompatible",
}
_PHASES: Final = ("queued", "routing", "prefill", "decode")
_RULE: Final = "─"


@dataclass(frozen=True, slots=True)
class Sample:
    """Message of WatchLoad and when it came, in seconds of a monotonic clock."""

    at: float
    load: pb.WatchLoadResponse


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second between two samples; None before the second one."""

    generated: float | None = None
    prompt: float | None = None

    @classmethod
    def between(cls, before: Sample | None, now: Sample) -> Rates:
        if before is None or now.at <= before.at:
            return cls()
        seconds = now.at - before.at
        # A request that ends is for a moment in neither count.
        generated = max(now.load.generated_tokens - before.load.generated_tokens, 0)
        prompt = max(now.load.prompt_tokens - before.load.prompt_tokens, 0)
        return cls(generated / seconds, prompt / seconds)


def as_json(info: pb.GetServerInfoResponse, now: Sample, rates: Rates) -> dict[str, Any]:
    """Return a sample for programs: the message's own fields, the gateway's, and the rates."""
    return {
        "gateway_id": info.gateway_id,
        "model": info.model,
        "version": info.version,
        "ready": info.ready,
        **message_members(now.load),
        "generated_tokens_per_s": rates.generated,
        "prompt_tokens_per_s": rates.prompt,
    }


def screen_lines(
    info: pb.GetServerInfoResponse, now: Sample, rates: Rates, width: int, height: int | None = None
) -> list[str]:
    """Return the screen, no line of which is wider than `width`; long tables end in a count of the rest.

    Args:
        height: most lines; None: all.
    """
    load, phases = now.load, now.load.phases
    state = "draining" if info.draining else "ready" if info.ready else "not ready"
    told = " ".join(f"{name} {getattr(phases, name)}" for name in _PHASES)
    models = ", ".join(model.name for model in info.models) or info.model
    head = [
        f"diptych {info.version}   {models}   gateway {info.gateway_id}   {state}",
        f"requests  {load.running} running  {load.waiting} waiting   phases  {told}",
        f"tokens/s  {_rate(rates.generated)} generated  {_rate(rates.prompt)} prompt",
        "",
    ]
    several = len({worker.model for worker in load.workers}) > 1
    of_models = ("MODEL",) if several else ()
    workers = _table(
        ("WORKER", "ROLE", "STATE", "RUN", "WAIT", *of_models, "KV IN USE", "TO PREFILL"),
        _worker_rows(load, models=several),
    )
    tenants = _table(("TENANT", "QUEUED", "PREFILL", "DECODE", "TOKENS"), _tenant_rows(load))
    faults = [f"{worker.worker_id}: {worker.detail}" for worker in load.workers if worker.detail]
    if height is not None:
        room = max(height - len(head) - len(faults) - 1, 6)
        workers = _cut(workers, max(room - len(tenants), room // 2))
        tenants = _cut(tenants, room - len(workers))
    lines = [*head, *workers, "", *tenants, *faults]
    return [line[:width].rstrip() for line in lines]


def _worker_rows(load: pb.WatchLoadResponse, *, models: bool) -> list[tuple[str, ...]]:
    return [
        (
            worker.worker_id,
            _ROLES.get(worker.role, "?"),
            _STATES.get(worker.state, "?"),
            str(worker.load.running),
            str(worker.load.waiting),
            *((worker.model,) if models else ()),
            _kv(worker.load),
            f"{worker.load.waiting_tokens} tokens" if worker.load.waiting_tokens else "",
        )
        for worker in sorted(load.workers, key=lambda worker: (worker.role, worker.worker_id))
    ]


def _tenant_rows(load: pb.WatchLoadResponse) -> list[tuple[str, ...]]:
    return [
        (
            tenant.tenant or "(no keys)",
            str(tenant.phases.queued + tenant.phases.routing),
            str(tenant.phases.prefill),
            str(tenant.phases.decode),
            str(tenant.generated_tokens),
        )
        for tenant in load.tenants
    ] or [("(no live request)", "", "", "", "")]


def _kv(load: pb.WorkerLoad) -> str:
    """Return a bar of the blocks that are not free; nothing for a worker without a pool."""
    if not load.total_blocks:
        return ""
    used = (load.total_blocks - load.free_blocks) / load.total_blocks
    filled = round(used * _BAR)
    return f"{'█' * filled}{'·' * (_BAR - filled)} {used:4.0%} of {load.total_blocks}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as what is in them."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    head = "  ".join(name.ljust(width) for name, width in zip(names, widths, strict=True))
    return [head, _RULE * len(head), *lines]


def _cut(table: list[str], lines: int) -> list[str]:
    """Return at most so many lines of a table."""
    if len(table) <= lines or lines < 4:
        return table
    return [*table[: lines - 1], f"… and {len(table) - lines + 1} more"]
