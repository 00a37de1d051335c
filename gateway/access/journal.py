"""Account of all ended calls: counters by tenant, and the access log where there is one."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from gateway.access.access_log import AccessLog
from gateway.access.call_record import CallRecord
from gateway.access.key_file import Scope

MAX_TENANTS: Final = 1000
"""Tenants with series of their own: those of tokens are made by another system, and may be many."""
OTHER: Final = "other"
"""Label of the tenants beyond."""


class Journal:
    """Counts each call, and writes its line.

    Args:
        path: of the access log; None: there is none.
    """

    def __init__(self, registry: CollectorRegistry, path: str | None, gateway_id: str) -> None:
        """Open the log. Raises OSError."""
        self._tenants: set[str] = set()
        self._calls = Counter(
            "diptych_tenant_calls", "Calls by tenant and status", ["tenant", "status"], registry=registry
        )
        self._tokens = Counter(
            "diptych_tenant_tokens",
            "Tokens by tenant: input, of which cached, and output",
            ["tenant", "kind"],
            registry=registry,
        )
        dropped = Counter(
            "diptych_access_log_dropped", "Lines that the access log has lost", registry=registry
        )
        self._log = None if path is None else AccessLog(path, gateway_id, dropped.inc)

    def ended(self, record: CallRecord) -> None:
        """Account for a call. Never waits."""
        if record.scope is Scope.INFERENCE and record.tenant is not None:
            tenant = self._label(record.tenant)
            self._calls.labels(tenant, record.status).inc()
            for kind, tokens in (
                ("input", record.usage.input_tokens),
                ("cached", record.usage.cached_tokens),
                ("output", record.usage.output_tokens),
            ):
                self._tokens.labels(tenant, kind).inc(tokens)
        if self._log is not None:
            self._log.write(record)

    def close(self) -> None:
        """Write what the log has not written yet."""
        if self._log is not None:
            self._log.close()

    def _label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER
            self._tenants.add(tenant)
        return tenant
