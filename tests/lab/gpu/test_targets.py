"""Targets of the GPU step: what a run's figures meet, miss, or do not measure."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lab.gpu.__main__ import sections
from lab.gpu.beside import OURS, PEER, figures, find_vllm, vllm_server
from lab.gpu.results import Outcome, save
from lab.gpu.section import Figure, figure
from lab.gpu.targets import TARGETS, Target, markdown, verdicts


def outcome(section: str, *found: Figure) -> dict[str, Any]:
    return asdict(Outcome(section, found, None, 1.0))


def verdict_of(text: str, *outcomes: dict[str, Any]) -> str:
    return next(verdict for target, verdict, _ in verdicts(outcomes) if target.text == text)


STREAMS = next(target.text for target in TARGETS if target.figures == r"(16|64) clients, tokens/s")


def clients(ratio_of_16: float, ratio_of_64: float | None) -> dict[str, Any]:
    found = [figure("beside", "16 clients, tokens/s", 1.0, "tokens/s", against=PEER, ratio=ratio_of_16)]
    if ratio_of_64 is not None:
        found.append(
            figure("beside", "64 clients, tokens/s", 1.0, "tokens/s", against=PEER, ratio=ratio_of_64)
        )
    return outcome("beside", *found)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [((1.05, 1.2), "met"), ((1.2, 1.04), "missed"), ((1.2, None), "unmeasured"), ((1.0, None), "missed")],
)
def test_a_target_of_several_figures_needs_all_of_them(
    ratios: tuple[float, float | None], verdict: str
) -> None:
    assert verdict_of(STREAMS, clients(*ratios)) == verdict


def test_nothing_measured_meets_nothing() -> None:
    assert {verdict for _, verdict, _ in verdicts([])} == {"unmeasured"}


def test_a_later_run_takes_the_place_of_an_earlier_one() -> None:
    assert verdict_of(STREAMS, clients(1.0, 1.0), clients(1.1, 1.1)) == "met"
    assert verdict_of(STREAMS, clients(1.1, 1.1), clients(1.1, 1.0)) == "missed"


def test_a_target_without_a_bound_of_its_own_is_that_of_the_figure() -> None:
    own = Target("", "short prompts", "one")
    for at_most, expected in ((12.0, "met"), (9.0, "missed"), (None, "unmeasured")):
        found = outcome("short prompts", figure("short prompts", "one", 10.0, "ms", at_most=at_most))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lab.gpu.targets.TARGETS", (own,))
            assert [verdict for _, verdict, _ in verdicts([found])] == [expected]


def test_every_target_names_a_section_that_there_is_or_none() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    known = sections()
    for target in TARGETS:
        assert not target.section or target.section in known
        re.compile(target.figures)


def test_the_report_ends_with_the_targets(tmp_path: Path) -> None:
    path = save(tmp_path, {"date": "2026-11-28 08:00"}, [], [clients(1.1, 1.2)])
    row = next(line for line in path.read_text().splitlines() if line.startswith(f"| {STREAMS} "))
    both = "16 clients, tokens/s 1 tokens/s (1.10); 64 clients, tokens/s 1 tokens/s (1.20)"
    assert row == f"| {STREAMS} | met | {both} |"
    assert markdown([]).count("unmeasured") == len(TARGETS)


def found(tokens: float, first: float, between: float) -> dict[str, float]:
    return {"output_throughput": tokens, "median_ttft_ms": first, "p99_ttft_ms": 2 * first,
            "median_itl_ms": between / 2, "p99_itl_ms": between}  # fmt: skip


def test_ratios_are_of_medians_and_larger_is_better() -> None:
    rounds = {
        (OURS, 16): [found(200, 100, 10), found(220, 120, 12)],
        (PEER, 16): [found(100, 330, 20), found(100, 330, 20)],
        (OURS, 1): [found(10, 5, 1)],
    }
    by = {one.name: one for one in figures("bf16", rounds)}
    assert by["16 clients, tokens/s"].ratio == 2.1
    assert by["16 clients, tokens/s"].met is True
    assert by["16 clients, TTFT p50"].ratio == 3.0
    assert by["16 clients, TTFT p50"].met is True
    assert by["16 clients, ITL p99"].ratio == pytest.approx(20 / 11)
    assert by["16 clients, ITL p99"].met is False
    assert by["1 clients, tokens/s"].ratio is None, "there is no peer"
    assert by["1 clients, tokens/s"].met is None


def test_fp8_is_held_against_other_bounds() -> None:
    rounds = {(OURS, 64): [found(100, 9, 9)], (PEER, 64): [found(100, 9, 9)]}
    assert {one.name: one.met for one in figures("fp8", rounds) if one.target is not None} == {
        "64 clients, tokens/s": True
    }
    assert {one.section for one in figures("fp8", rounds)} == {"beside fp8"}


def test_vllm_is_the_one_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_vllm(tmp_path / "mine") == tmp_path / "mine"
    monkeypatch.setenv("PATH", str(tmp_path))
    command = tmp_path / "vllm"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert find_vllm(None) == command
    server = vllm_server("fp8", tmp_path / "model", command)
    assert server.arguments[:3] == (str(command), "serve", str(tmp_path / "model"))
    assert "--quantization" in server.arguments
    assert not any(name.startswith("VLLM_CPU") for name in server.environment)
