"""The order of measurements, and going on after an interruption."""

from pathlib import Path

import pytest

from lab.peers.cells import (
    PREFILL,
    QUEUED,
    STREAMS,
    TEXT,
    Cell,
    Journal,
    Measurement,
    all_cells,
    clients_of,
    closed_loop,
)
from lab.peers.options import parse
from lab.peers.servers import Server
from lab.peers.shapes import Shape

A = Server("a", "vllm", "bf16", (), streams=True)
B = Server("b", "llama.cpp", "Q4_0", ())


def test_rounds_are_interleaved_and_the_text_comes_first() -> None:
    cells = all_cells([A, B], [1, 16], 2)
    of_a = [TEXT, "C=1", "C=16", PREFILL, STREAMS, QUEUED]
    of_b = of_a[:-2]
    turns = [(number, name, loads) for number in range(2) for name, loads in (("a", of_a), ("b", of_b))]
    assert cells == [Cell(number, name, load) for number, name, loads in turns for load in loads]


def test_a_load_says_its_clients() -> None:
    assert clients_of(closed_loop(16)) == 16


def test_other_lengths_are_for_servers_that_take_any() -> None:
    shapes = [Shape(512, 128, 16), Shape(1500, 64, 1)]
    cells = all_cells([A, B], [1], 1, shapes)
    of_a = [cell.load for cell in cells if cell.server == "a"]
    assert of_a == [TEXT, "C=1", PREFILL, STREAMS, QUEUED, "512+128 C=16", "1500+64 C=1"]
    assert [cell.load for cell in cells if cell.server == "b"] == [TEXT, "C=1", PREFILL]
    assert [Shape.of_load(shape.load) for shape in shapes] == shapes
    assert Shape.of_load("C=16") is None


def test_a_shape_is_read_from_a_flag() -> None:
    assert parse(["--shapes", "512+128@16,32+256@1"]).shapes == (Shape(512, 128, 16), Shape(32, 256, 1))
    assert parse([]).shapes == ()


@pytest.mark.parametrize("text", ["512", "512+128", "512+0@1", "a+b@c", "512+128@16,", "2000+128@1"])
def test_a_shape_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--shapes", text])
    assert "argument --shapes: " in capsys.readouterr().err


def test_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    path, cells = tmp_path / "runs" / "x.jsonl", all_cells([A, B], [1], 1)
    first = Journal(path, {"rounds": 1})
    assert first.missing(cells) == cells
    first.add(Measurement(cells[0], {"right_answers": 1.0, "nothing": None}))
    first.add(Measurement(cells[3], {"rate": 2.0}))
    again = Journal(path, {"rounds": 1})
    assert again.measured == first.measured
    assert again.missing(cells) == [*cells[1:3], *cells[4:]]


def test_measures_again_what_was_cut_short(tmp_path: Path) -> None:
    path, cells = tmp_path / "x.jsonl", all_cells([B], [1], 1)
    first = Journal(path, {})
    first.add(Measurement(cells[0], {"rate": 1.0}))
    first.add(Measurement(cells[1], {"rate": 2.0}))
    path.write_text(path.read_text()[:-20])
    again = Journal(path, {})
    assert again.missing(cells) == cells[1:]
    again.add(Measurement(cells[1], {"rate": 3.0}))
    assert Journal(path, {}).missing(cells) == cells[2:]


def test_measurements_for_another_question_are_not_mixed_in(tmp_path: Path) -> None:
    path, cells = tmp_path / "x.jsonl", all_cells([B], [1], 1)
    Journal(path, {"rounds": 1}).add(Measurement(cells[0], {}))
    assert Journal(path, {"rounds": 2}).missing(cells) == cells
    assert Journal(path, {"rounds": 1}).missing(cells) == cells
