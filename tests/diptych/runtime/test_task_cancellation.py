import asyncio

import pytest

from diptych.runtime.task_cancellation import end_task, to_its_end


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


async def test_work_ends_first_however_often_its_caller_is_cancelled() -> None:
    go, ended = asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        ended.append("work")

    async def caller() -> None:
        try:
            await to_its_end(work())
        finally:
            ended.append("caller")

    task = asyncio.create_task(caller())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not ended
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work", "caller"]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_result_and_error_of_work_are_its_callers(cancelled: bool) -> None:
    async def work(fails: bool) -> str:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("broken")
        return "done"

    for fails in (False, True):
        task = asyncio.create_task(to_its_end(work(fails)))
        await asyncio.sleep(0)
        if cancelled:
            task.cancel()
        (found,) = await asyncio.gather(task, return_exceptions=True)
        expected = asyncio.CancelledError if cancelled else ValueError if fails else str
        assert isinstance(found, expected)
