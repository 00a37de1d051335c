"""The interference figures: what counts as a gap, targets over rounds, and scenes on a scripted server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.bench.backends import Backend
from diptych.bench.request import BenchRequest, Reply, RequestFailed
from lab.interference.neighbours import Ticks
from lab.interference.report import markdown
from lab.interference.scenes import Incomplete, Sizes, play
from lab.interference.systems import APART, LENDING, WIDE, systems
from lab.interference.targets import medians, spread, targets

SMALL = Sizes(stream_tokens=6, prompts=2, prefixes=2, alone_s=0.05, beside_s=0.1)
GAP_S = 0.005


class Server:
    """Answers token by token; remembers whole blocks of prompts, as a prefix cache does."""

    name = "scripted"

    def __init__(
        self, on_output: Callable[[float], None], cache: set[tuple[int, ...]], *, fails: bool
    ) -> None:
        self._on_output, self._cache, self._fails = on_output, cache, fails

    async def model(self) -> str:
        return "model"

    async def send(self, request: BenchRequest) -> Reply:
        if self._fails:
            raise RequestFailed("UNAVAILABLE", "no workers")
        prompt = request.prompt
        assert not isinstance(prompt, str)
        arrivals = []
        for _ in range(request.output_len):
            await asyncio.sleep(GAP_S)
            arrivals.append(time.perf_counter())
            self._on_output(arrivals[-1])
        return Reply(tuple(arrivals), len(prompt), request.output_len, self._cached(prompt), "")

    def _cached(self, prompt: tuple[int, ...]) -> int:
        if self._cache is None:
            return 0
        ends = [end for end in range(16, len(prompt), 16) if prompt[:end] in self._cache]
        self._cache.update(prompt[:end] for end in range(16, len(prompt) + 1, 16))
        return max(ends, default=0)

    async def close(self) -> None:
        pass


def client_of(
    *, caches: bool = True, fails: bool = False
) -> Callable[[Callable[[float], None]], AbstractAsyncContextManager[Backend]]:
    cache: set[tuple[int, ...]] | None = set() if caches else None

    @asynccontextmanager
    async def client(on_output: Callable[[float], None]) -> AsyncIterator[Backend]:
        yield Server(on_output, cache, fails=fails)

    return client


async def test_each_system_has_the_figures_that_its_targets_need() -> None:
    one = {name: await play(client_of(), name, 7, SMALL) for name in (APART, LENDING, WIDE)}
    one[LENDING]["start_s"] = 7.0
    for target in targets([one]):
        assert target.value is not None, target.what
    assert one[LENDING]["median_itl_one_ms"] >= 1000 * GAP_S
    assert one[APART]["prompt_throughput_beside"] > 0


async def test_a_prefix_that_was_not_cached_is_no_figure() -> None:
    with pytest.raises(Incomplete, match="0 tokens were cached, not 2000"):
        await play(client_of(caches=False), LENDING, 7, SMALL)


async def test_a_failed_request_is_no_figure() -> None:
    with pytest.raises(Incomplete, match="no workers"):
        await play(client_of(fails=True), WIDE, 7, SMALL)


def rounds_of(*ratios: float) -> list[dict[str, dict[str, float | None]]]:
    return [
        {
            APART: {
                "p99_itl_alone_ms": 20.0,
                "p99_itl_beside_ms": 20.0 * ratio,
                "prompt_throughput_alone": 800.0,
                "prompt_throughput_beside": 760.0,
            },
            LENDING: {"median_itl_alone_ms": 15.0, "start_s": 8.0 + ratio},
            WIDE: {"median_itl_alone_ms": 12.0},
        }
        for ratio in ratios
    ]


def test_a_target_is_the_median_of_ratios_within_rounds() -> None:
    found = {one.what.split(":")[0].split(",")[0]: one for one in targets(rounds_of(1.1, 1.5, 1.2))}
    itl = found["ITL p99 of 8 streams"]
    assert itl.values == pytest.approx((1.1, 1.5, 1.2))
    assert (itl.value, itl.met) == (pytest.approx(1.2), True)
    assert found["prefill tokens/s"].met is True
    lent = found["8 streams alone"]
    assert (lent.value, lent.met) == (pytest.approx(1.25), False)
    assert found["one stream alone"].met is None, "nobody measured it"
    assert found["start until ready"].value == pytest.approx(9.2)


def test_the_tables_say_what_is_missed_and_what_was_not_measured() -> None:
    text = markdown(rounds_of(1.4, 1.6), "a model")
    assert (
        "| ITL p99 of 8 streams, beside prompts / alone | at most 1.3 | 1.50 (1.40, 1.60) | **no** |" in text
    )
    assert "| 2,000 cached tokens: TTFT, again / the first time | at most 0.1 | not measured | – |" in text
    assert "| 8 streams beside prompts, ITL p99 ms | 30.0 (28.0–32.0) | – | – |" in text
    assert medians([], APART) == {}
    assert spread([], APART, "start_s") is None


def test_only_the_lending_system_lends() -> None:
    made = systems("bf16", "bundled", 2)
    flags = {name: one.command(1, 2, Path("ready")) for name, one in made.items()}
    assert "--prefill-threads" not in flags[LENDING]
    assert flags[APART][flags[APART].index("--decode-threads") + 1] == "1"
    assert flags[WIDE][flags[WIDE].index("--decode-threads") + 1] == "2"


def test_what_others_used_is_all_but_our_own(tmp_path: Path) -> None:
    def process(pid: int, parent: int, user: int, system: int, name: str = "a (b) c") -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        rest = f"S {parent} 0 0 0 0 0 0 0 0 0 {user} {system} 0 0"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {rest}")

    def moment(user: int, steal: int, child: int) -> Ticks:
        (tmp_path / "stat").write_text(f"cpu {user} 0 0 999999 0 0 0 {steal} 0 0\ncpu0 1 1\n")
        process(os.getpid(), 1, 100, 0)
        process(70001, os.getpid(), 0, 0)
        process(70002, 70001, child, 0)
        process(70003, 1, user, 7)
        return Ticks.now(tmp_path)

    second = os.sysconf("SC_CLK_TCK")
    before, after = moment(0, 0, 0), moment(3 * second, second, 2 * second)
    after = replace(after, moment=before.moment + 2.0)
    assert after.others_since(before, 2) == pytest.approx(0.5)  # of 4 core seconds 2 were theirs


def test_time_that_we_use_is_our_own() -> None:
    before = Ticks.now()
    ends = time.monotonic() + 0.3
    while time.monotonic() < ends:
        pass
    after = Ticks.now()
    assert after.own > before.own
    assert after.all - before.all >= after.own - before.own - 2  # ticks of the two are counted apart
