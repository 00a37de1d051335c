"""APIs by turns at a gateway between scripted workers, and their table."""

from __future__ import annotations

from pathlib import Path

from lab.costs.gateway.__main__ import main
from lab.costs.gateway.measure import Sample
from lab.costs.gateway.report import markdown


def test_gateway_cost_measures_every_api(tmp_path: Path) -> None:
    table = tmp_path / "apis.md"
    flags = ["--system", "played", "--streams", "2", "--tokens", "20", "--step", "2", "--rounds", "2"]
    assert main([*flags, "--output", str(table)]) == 0
    lines = table.read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == [
        *("api", "grpc", "kserve", "openai")
    ]
    assert "medians of 2 interleaved rounds" in lines[0]


def test_a_table_of_medians() -> None:
    samples = [Sample(api, speed, 50.0, 15.0, 16.0) for api, speed in (("grpc", 100), ("openai", 90))] * 3
    samples += [Sample("grpc", 300, 70.0, 15.0, 16.0), Sample("openai", 10, 70.0, 15.0, 16.0)]
    assert markdown(samples, "t").splitlines()[-2:] == [
        "| grpc | 100 (100–300) | 50 (50–70) | 15.0 (15.0–15.0) | 16.0 (16.0–16.0) | 100.0% |",
        "| openai | 90 (10–90) | 50 (50–70) | 15.0 (15.0–15.0) | 16.0 (16.0–16.0) | 90.0% |",
    ]
