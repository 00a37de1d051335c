import asyncio
import gc
import time

import pytest

from diptych.bench.self_watch import SelfWatch, Strain


async def test_a_busy_loop_is_told_from_an_idle_one() -> None:
    async with SelfWatch() as idle:
        await asyncio.sleep(0.2)
    async with SelfWatch() as busy:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:  # noqa: ASYNC110 (a loop that never rests is what it must see)
            await asyncio.sleep(0)
    assert idle.strain().loop_share < 0.5
    assert busy.strain().loop_share > idle.strain().loop_share
    assert busy.strain().cpu_share >= 0.9 * busy.strain().loop_share


async def test_sees_a_loop_that_is_held_up() -> None:
    async with SelfWatch() as watch:
        await asyncio.sleep(0.02)
        time.sleep(0.1)  # noqa: ASYNC251 (this is the fault that it must see)
        await asyncio.sleep(0.02)
    assert watch.strain().lag_max_ms >= 80


async def test_garbage_is_collected_again_afterwards() -> None:
    async with SelfWatch():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("loop_share", "lag", "verdict"), [(0.9, 0.1, "busy"), (0.1, 30.0, "starved"), (0.3, 1.0, "no")]
)
def test_names_the_bottleneck(loop_share: float, lag: float, verdict: str) -> None:
    assert Strain(loop_share, loop_share, 0.0, lag, lag).bottleneck == verdict
