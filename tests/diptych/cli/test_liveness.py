"""When a silence is one."""

from __future__ import annotations

import asyncio

import pytest

from diptych.cli.restart_policy import LivenessProbe, wait_until_unresponsive


@pytest.mark.parametrize(
    ("answers", "asked"),
    [("...", 3), ("y...", 4), ("..y...", 6), (".y..yy..y...", 12)],
)
async def test_only_questions_in_a_row_count(answers: str, asked: int) -> None:
    said = iter(answers + "y" * 20)
    count = 0

    async def answer() -> bool:
        nonlocal count
        count += 1
        return next(said) == "y"

    async with asyncio.timeout(60):
        await wait_until_unresponsive(answer, LivenessProbe(every_s=0.001, max_failures=3))
    assert count == asked
