"""Traces from files: formats, repetitions, rates, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.traces import TraceRow
from diptych.replay.trace_file import Traffic, read_trace

ROWS = (TraceRow(0.0, 600, 5, (1, 2)), TraceRow(1.0, 700, 6, (1, 3)), TraceRow(2.0, 100, 7, (4,)))


def test_formats_are_told_apart(tmp_path: Path) -> None:
    azure, mooncake, plain = (tmp_path / name for name in ("a.csv", "m.jsonl", "p.jsonl"))
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.0,374,44\n2023-11-16 18:15:48.0,396,109\n"
    )
    record = {"timestamp": 2000, "input_length": 600, "output_length": 5}
    mooncake.write_text(json.dumps({**record, "hash_ids": [1, 2]}) + "\n")
    plain.write_text(json.dumps(record) + "\n\n")
    assert read_trace(azure) == (TraceRow(0.0, 374, 44), TraceRow(2.0, 396, 109))
    assert read_trace(mooncake) == (TraceRow(2.0, 600, 5, (1, 2)),)
    assert read_trace(plain) == (TraceRow(2.0, 600, 5),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "timestamp"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "input_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": "x"}', "output_length"),
        ("no", "line 2"),
        ("[]", "object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n' + line + "\n")
    with pytest.raises(BadDataset, match=words) as error:
        read_trace(path)
    assert "line 2" in str(error.value)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("azure.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,\xff,44\n"),
        ("mooncake.jsonl", b'{"hash_ids": "\xff"}\n'),
        ("plain.jsonl", b'{"timestamp": "\xff"}\n'),
    ],
)
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadDataset, match="utf-8"):
        read_trace(tmp_path / name)


def test_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(BadDataset, match="no requests"):
        read_trace(tmp_path / "t.jsonl")


def test_a_repetition_shares_no_blocks_with_the_first_turn() -> None:
    requests = list(Traffic(ROWS, 7).requests())
    assert [one.arrival_s for one in requests] == [0, 1, 2, 3, 4, 5, 6]
    first, second = ({b for one in turn for b in one.blocks} for turn in (requests[:3], requests[3:6]))
    assert not first & second
    assert requests[3].blocks[0] == requests[4].blocks[0]


def test_speed_scales_the_offered_rate() -> None:
    traffic = Traffic(ROWS, 3).at_rate(4.0)
    assert traffic.rate == pytest.approx(4.0)
    assert [one.arrival_s for one in traffic.requests()] == [0, 0.25, 0.5]


def test_shared_prefix_counts_whole_blocks_that_were_there_before() -> None:
    assert Traffic(ROWS, 3).shared_prefix() == pytest.approx(512 / 1400)
