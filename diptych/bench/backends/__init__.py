"""Backends: protocols of servers. A backend sends one request and stamps each message with output."""

from __future__ import annotations

from typing import Protocol

from diptych.bench.request import BenchRequest, Reply


class Unreachable(Exception):
    """No benchmark can begin: no server answers, or it names no model."""


class Backend(Protocol):
    """Client of a server on one event loop. Requests may run at the same time."""

    @property
    def name(self) -> str: ...

    async def model(self) -> str:
        """Return the model that requests ask for. Raises Unreachable."""

    async def send(self, request: BenchRequest) -> Reply:
        """Stream one answer. Raises RequestFailed when it does not end well."""

    async def close(self) -> None: ...
