"""The way in which a worker asks its supervisor to be started in the other role: by its exit status.

A worker changes its role by its end. It drains, which gives every grant back, and exits; the kernel unmaps
the pools of its peers, and its end is the proof by which they free what it might have written to. The
process of the other role is another one, with another incarnation. A worker that is killed on the way has
another exit status: its supervisor starts it in the role that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.runtime.discovery.records import Role

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
"""Roles between which a worker can change: an encode worker has no text model."""
EXIT_STATUS: Final[Mapping[Role, int]] = {"prefill": 84, "decode": 85}
"""Statuses that neither Python, a shell nor sysexits.h uses."""


def role_asked_by(status: int) -> Role | None:
    """Return the role in which a process that ended with `status` is to be started; None for its own."""
    return next((role for role, its in EXIT_STATUS.items() if its == status), None)


def other_role(role: Role) -> Role:
    """Return the role that is not this one."""
    return "decode" if role == "prefill" else "prefill"
