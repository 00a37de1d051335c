"""Who makes a call, as the rest of the gateway knows it: a tenant, what it may do, and how much of it.

The tenant comes from the credential and from nothing else: no field of a request names one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from gateway.access.quota import QuotaUsage

DEFAULT_TENANT: Final = ""  # of all callers, where no keys are asked for


class Scope(StrEnum):
    """What a key is good for. None includes another one."""

    INFERENCE = "inference"  # the public services: generate, tokenise, list models, cancel
    ADMIN = "admin"  # diptych.v1.AdminService


@dataclass(frozen=True, slots=True)
class Caller:
    """Requests that are running keep theirs when its key is taken out of the file."""

    tenant: str
    scopes: frozenset[Scope]
    meter: QuotaUsage = field(repr=False)


def anonymous() -> Caller:
    """The one tenant of a gateway without keys: it may do everything, without a quota."""
    return Caller(DEFAULT_TENANT, frozenset(Scope), QuotaUsage("anybody"))
