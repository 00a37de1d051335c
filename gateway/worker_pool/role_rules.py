"""The rules by which a worker may change its role. Pure: what is known of the workers in, the objection out.

They hold for an operator's order and for automatic changes alike: never a role's last ready worker, never two
changes at once, never a worker that nothing could start in the other role.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.attempt.types import Role
from gateway.worker_pool.registry import Worker


@dataclass(frozen=True, slots=True)
class RoleView:
    """A linked worker as the rules see it.

    ``ready``: it may get new work. ``can_change``: its supervisor can start it in the other role.
    ``becomes``: the role that it drains for. ``work``: what would have to be done elsewhere.
    """

    worker_id: str
    role: Role
    ready: bool = True
    can_change: bool = True
    becomes: Role | None = None
    work: int = 0


@dataclass(frozen=True, slots=True)
class RoleBounds:
    """The fewest ready workers that a change leaves in each role."""

    prefill: int = 1
    decode: int = 1

    def least(self, role: Role) -> int:
        """Return the bound of a role; one is always left."""
        return max(self.prefill if role is Role.PREFILL else self.decode, 1)


def other(role: Role) -> Role:
    """Return the role that is not this one."""
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def ready_workers(workers: Iterable[RoleView], role: Role) -> list[RoleView]:
    """Return the ready workers of a role."""
    return [one for one in workers if one.role is role and one.ready]


def objection(workers: Sequence[RoleView], worker_id: str, bounds: RoleBounds | None = None) -> str:
    """Return why this worker cannot change to the other role now, in a line; empty where it can."""
    worker = next((one for one in workers if one.worker_id == worker_id), None)
    if worker is None or not worker.ready:
        return "it is not ready: it leaves, or its heartbeat is overdue"
    if not worker.can_change:
        return "no supervisor can start it in the other role: `diptych up` can, on a GPU with --auto-roles"
    if busy := next((one for one in workers if one.becomes is not None), None):
        return f"{busy.worker_id} is changing its role: one worker changes at a time"
    least = (bounds or RoleBounds()).least(worker.role)
    if len(ready_workers(workers, worker.role)) <= least:
        few = f"one of the last {least} ready workers" if least > 1 else "the last ready worker"
        return f"it is {few} of its role"
    return ""


def views(workers: Iterable[Worker]) -> list[RoleView]:
    """Return the rules' view of linked workers."""
    return [
        RoleView(
            worker.record.worker_id,
            Role(worker.record.role),
            ready=worker.accepts_work,
            can_change=bool(worker.record.other_roles),
            becomes=worker.load.becomes,
            work=worker.load.running + worker.load.waiting_tokens,
        )
        for worker in workers
    ]
