"""Whole rounds on servers in processes of their own: one that parks, one that starts anew, one that fails."""

import sys
import textwrap
from pathlib import Path

import pytest

from lab.peers import rounds
from lab.peers.cells import MACHINE, PEAK, START, STREAMS, TEXT, Journal, all_cells, closed_loop
from lab.peers.measure import Sizes
from lab.peers.rounds import Rounds
from lab.peers.servers import Family, Server
from lab.peers.summary import Summary

ROOT = Path(__file__).parents[2]
SIZES = Sizes(
    input_len=11, output_len=3, per_client=1, fewest=2, prefills=1, alone_s=0.1, beside_s=0.2, rest_s=0.0
)
SCRIPTED = textwrap.dedent(
    """
    import asyncio, sys
    from tests.diptych.bench.scripted_http import ScriptedHttp
    async def main():
        script = ScriptedHttp(ttft=0.01, itl=0.005, hangs_up=sys.argv[2] == "llama.cpp")
        server = await asyncio.start_server(script.handle, "127.0.0.1", int(sys.argv[1]))
        await server.serve_forever()
    asyncio.run(main())
    """
)


def scripted(name: str, family: Family, *, parks: bool = False, streams: bool = False) -> Server:
    return Server(
        name,
        family,
        "bf16",
        (sys.executable, "-c", SCRIPTED, "{port}", family),
        {"PYTHONPATH": str(ROOT)},
        parks=parks,
        streams=streams,
    )


PARKED = scripted("vllm-a", "vllm", parks=True, streams=True)
FRESH = scripted("llama.cpp-b", "llama.cpp")
BROKEN = Server("vllm-c", "vllm", "bf16", (sys.executable, "-c", "import sys; sys.exit('no memory')"))


@pytest.fixture(autouse=True)
def _no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch reaches on this machine takes seconds to measure and is not what is tested here."""
    monkeypatch.setattr(rounds, "bf16_peak", lambda: 1e9)


@pytest.mark.full
def test_measures_all_that_can_be_measured_and_says_what_could_not(tmp_path: Path) -> None:
    servers, told = [PARKED, FRESH, BROKEN], list[str]()
    cells = all_cells(servers, [1, 2], rounds=2)
    journal = Journal(tmp_path / "x.jsonl", {})
    run = Rounds(servers, journal, SIZES, tmp_path)
    run.run(cells, told.append)
    assert list(run.faults) == [BROKEN.name]
    assert "no memory" in run.faults[BROKEN.name]
    assert {cell.server for cell in journal.missing(cells)} == {BROKEN.name}
    asked = [one.cell for one in journal.measured if one.cell.load not in (START, PEAK)]
    assert asked == [cell for cell in cells if cell.server != BROKEN.name]
    starts = [one.cell.server for one in journal.measured if one.cell.load == START]
    assert starts == [PARKED.name, FRESH.name, FRESH.name]
    assert sum(one.cell.server == MACHINE for one in journal.measured) == 2
    assert any("LEFT OUT: vllm-c" in line for line in told)


def test_figures_are_those_of_the_servers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.jsonl", {})
    Rounds([PARKED, FRESH], journal, SIZES, tmp_path).run(
        all_cells([PARKED, FRESH], [2], 1), lambda line: None
    )
    summary = Summary(journal.measured)
    for server in (PARKED.name, FRESH.name):
        assert summary.median(server, closed_loop(2), "failed") == 0
        assert summary.median(server, closed_loop(2), "inexact") == 0
        assert summary.median(server, closed_loop(2), "total_output_tokens") == 6
        assert (summary.median(server, closed_loop(2), "median_ttft_ms") or 0) >= 10
        assert summary.median(server, TEXT, "right_answers") == 0
    assert (summary.median(PARKED.name, STREAMS, "median_itl_beside_ms") or 0) >= 5
    assert (summary.median(PARKED.name, STREAMS, "prompt_throughput_beside") or 0) > 0


def test_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    cells = all_cells([FRESH], [1], 2)
    first = Journal(tmp_path / "x.jsonl", {})
    Rounds([FRESH], first, SIZES, tmp_path).run(cells[:2], lambda line: None)
    told = list[str]()
    second = Journal(tmp_path / "x.jsonl", {})
    Rounds([FRESH], second, SIZES, tmp_path).run(cells, told.append)
    assert second.missing(cells) == []
    assert told[0].startswith(f"[1/{len(cells) - 2}")
