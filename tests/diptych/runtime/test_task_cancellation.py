import asyncio

import pytest

from diptych.runtime.task_cancellation import end_task


async def test_a_task_that_loses_cancellations_is_ended() -> None:
    lost = 0

    async def loses_two() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost == 2:
                    raise
                lost += 1

    task = asyncio.create_task(loses_two())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_task(task), 2)
    assert task.cancelled()
    assert lost == 2


async def test_an_error_is_logged_and_none_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("broken")

    task = asyncio.create_task(fails(), name="the task")
    await asyncio.sleep(0)
    await end_task(task)
    assert "the task" in caplog.text
    assert "broken" in caplog.text
    await end_task(None)
