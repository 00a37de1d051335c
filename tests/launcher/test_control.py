"""The socket by which `diptych restart` finds a system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from launcher.control import ask_restart, control_socket


async def test_a_second_system_with_the_port_does_without() -> None:
    asked: list[Sequence[str]] = []
    warnings: list[str] = []

    async def restart(names: Sequence[str], say: Callable[[str], None]) -> None:
        asked.append(names)

    async def never(names: Sequence[str], say: Callable[[str], None]) -> None:
        raise AssertionError("the first one has the name")

    async with control_socket(47, restart, warnings.append):
        assert warnings == []
        async with control_socket(47, never, warnings.append):
            assert await asyncio.to_thread(ask_restart, 47, ["decode-0"], print)
        assert len(warnings) == 1
        assert "47" in warnings[0]
    assert asked == [["decode-0"]]
