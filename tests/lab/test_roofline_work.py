"""The engine's tables: bytes and operations against loops that count them, rooflines, and the whole tool."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader

from diptych.engine.models.shape import LayerShape, ModelShape, Rotation
from diptych.runtime.settings import resolve_model
from lab.precisions import load_precision, matrix_bytes
from lab.roofline import record
from lab.roofline.__main__ import main
from lab.roofline.ceilings import FORMATS, Ceilings, Peak, measure_ceilings
from lab.roofline.measure import Grid, Point
from lab.roofline.report import markdown
from lab.roofline.work import decode_work, prefill_work, roof, weight_size
from tests.diptych.engine.weights import gguf_files
from tests.forms import sampled

SHAPE = ModelShape(
    family="llama",
    vocab_size=11,
    hidden_size=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=10,
    rms_eps=1e-5,
    max_context=64,
    layers=(LayerShape(),) * 2,
    rotations=(Rotation(10000.0, 4),),
)
# q, k, v, o, gate, up, down as [rows, columns]
MATRICES = [(16, 6), (8, 6), (8, 6), (6, 16), (10, 6), (10, 6), (6, 10)]
LAYERS = 2 * sum(rows * columns for rows, columns in MATRICES)
CLOSING = sum(rows * columns for rows, columns in MATRICES if rows != 8)  # of a layer, keys and values aside
HEAD = 11 * 6
CEILINGS = Ceilings(
    threads=2,
    read_rate=1000.0,
    peaks={"fp32": Peak(500.0, "library"), "bf16": Peak(2000.0, "registers"), "int8": Peak(4e3, "library")},
)


ceilings_once = functools.cache(measure_ceilings)  # a measurement takes seconds
bundled_once = functools.cache(functools.partial(load_precision, resolve_model("bundled"), "bf16"))


def test_weights_are_counted_matrix_by_matrix() -> None:
    size = weight_size(SHAPE, "bf16")
    assert (size.layers, size.head, size.nbytes) == (LAYERS, HEAD, 2 * (LAYERS + HEAD))
    assert weight_size(SHAPE, "int8").nbytes == LAYERS + HEAD
    assert weight_size(SHAPE, "gguf", file_bytes=77).nbytes == 77


def counted_attention(positions: list[int], layers: int = SHAPE.num_layers) -> int:
    """Multiplications and additions of queries at `positions` with keys and with values, one by one."""
    total = 0
    for position in positions:
        for _ in range(position + 1):
            total += layers * SHAPE.num_heads * (2 * SHAPE.head_dim + 2 * SHAPE.head_dim)
    return total


def test_a_decode_step() -> None:
    work = decode_work(SHAPE, weight_size(SHAPE, "bf16"), 2, batch=3, context=5)
    assert work.products == 3 * 2 * (LAYERS + HEAD)
    assert work.attention == counted_attention([4, 4, 4])
    kv_of_a_token = 2 * 2 * (2 * 4) * 2  # keys and values, layers, elements, bytes
    assert work.read_bytes == 2 * (LAYERS + HEAD) + 3 * 5 * kv_of_a_token


@pytest.mark.parametrize(("tokens", "chunks"), [(7, [3, 6, 7]), (3, [3]), (1, [1])])
def test_a_prefill_in_chunks(tokens: int, chunks: list[int]) -> None:
    work = prefill_work(SHAPE, weight_size(SHAPE, "fp32"), 4, tokens, chunk=3)
    assert work.products == 2 * (tokens * LAYERS - (tokens - 1) * CLOSING + HEAD)
    assert work.attention == counted_attention(list(range(tokens)), 1) + counted_attention([tokens - 1], 1)
    kv_of_a_token = 2 * 2 * (2 * 4) * 4
    assert work.read_bytes == len(chunks) * 4 * (LAYERS + HEAD) + sum(chunks) * kv_of_a_token


def test_the_roof_is_the_larger_of_both_times() -> None:
    weights = weight_size(SHAPE, "bf16")
    one = decode_work(SHAPE, weights, 2, 1, 1)
    memory = roof(one, CEILINGS, "bf16", 2)
    assert memory.bound == "memory"
    assert memory.seconds == pytest.approx(one.read_bytes / 1000)
    many = decode_work(SHAPE, weights, 2, 50, 1)
    arithmetic = roof(many, CEILINGS, "bf16", 2)
    assert arithmetic.bound == "arithmetic"
    assert arithmetic.seconds == pytest.approx((many.products + many.attention) / 2000)
    mixed = roof(many, CEILINGS, "int8", 4)  # weights in int8, keys and values in fp32
    assert mixed.seconds == pytest.approx(many.products / 4000 + many.attention / 500)


def test_keys_in_bf16_are_widened_where_that_is_faster() -> None:
    slow = replace(CEILINGS, peaks={**CEILINGS.peaks, "bf16": Peak(50, "library")})
    many = decode_work(SHAPE, weight_size(SHAPE, "int8"), 2, 50, 1)
    assert roof(many, slow, "int8", 2).seconds == pytest.approx(many.products / 4000 + many.attention / 500)


@pytest.mark.parametrize("threads", sampled([1, 2], [1]))
def test_ceilings_are_those_of_some_machine(threads: int) -> None:
    """No figure is asserted but that each is one: between a machine of the eighties and none that exists."""
    found = ceilings_once(threads)
    assert 1e7 < found.read_rate < 1e13
    assert set(found.peaks) == set(FORMATS)
    for peak in found.peaks.values():
        assert 1e7 < peak.rate < 1e15


def test_the_better_of_two_measurements_counts_figure_by_figure() -> None:
    other = Ceilings(
        2, 900.0, {**CEILINGS.peaks, "int8": Peak(5e3, "registers"), "bf16": Peak(1.0, "library")}
    )
    best = CEILINGS.or_better(other)
    assert best == other.or_better(CEILINGS)
    assert best.read_rate == 1000.0
    assert best.peaks == {**CEILINGS.peaks, "int8": Peak(5e3, "registers")}


def test_ceilings_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr("lab.roofline.ceilings._build", lambda folder: None)
    found = measure_ceilings(1)
    assert {peak.by for peak in found.peaks.values()} == {"library"}
    assert found.read_rate > 1e7


def test_points_that_need_too_much_memory_are_left_out() -> None:
    model = bundled_once()
    block = model.kv_layout(16).bytes_per_block
    grid = Grid([1, 4], [16, 64], [16], kv_bytes=4 * block)
    assert grid.decodes(model) == [(1, 16), (1, 64), (4, 16)]


def test_the_matrices_of_a_gguf_file_are_counted_once(tmp_path: Path) -> None:
    """The embedding, too, which is the head."""
    path = tmp_path / "qwen2.gguf"
    gguf_files.write(gguf_files.oracle_of("qwen2"), path, "qwen2")
    tensors = GGUFReader(path).tensors
    assert "output.weight" not in {one.name for one in tensors}
    vectors = sum(int(one.n_bytes) for one in tensors if len(one.shape) == 1)
    assert matrix_bytes(path, "gguf") == sum(int(one.n_bytes) for one in tensors) - vectors
    assert matrix_bytes(path, "bf16") is None


def test_a_later_run_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "engine.json"
    for dtype, threads, mark in (("bf16", 2, 1), ("bf16", 1, 2), ("fp32", 1, 3), ("bf16", 2, 4)):
        runs = record.gather(file, {"dtype": dtype, "threads": threads, "mark": mark})
    assert [one["mark"] for one in runs] == [2, 4, 3]
    assert record.read(file) == runs


def test_a_point_beside_its_roof() -> None:
    model = bundled_once()
    fast = Ceilings(2, 30e9, {name: Peak(5e11, "registers") for name in FORMATS})
    points = [
        Point("decode", 1, 128, 0.0125, 0.012, 0.013, 5),
        Point("decode", 8, 512, 0.020, 0.019, 0.021, 5),
        Point("prefill", 1, 512, 0.400, 0.4, 0.4, 3),
    ]
    table = markdown([record.as_object(model, "bf16", None, fast, points)])
    step = (134.5e6 * 2 + 128 * 23040) / 30e9 * 1000
    assert f"| 1 | 12.5 ({step:.1f} m, {step / 12.5:.0%}) | – |" in table
    assert "| 8 | – | 20.0 (" in table
    assert "| 512 | 400 | 1,280 |" in table


def test_the_tool_measures_and_gathers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.roofline.__main__.measure_ceilings", ceilings_once)
    file, picture = tmp_path / "engine.json", tmp_path / "engine.png"
    flags = ["--batches", "1,2", "--contexts", "32", "--prompts", "40", "--output-file", str(file)]
    assert main([*flags, "--dtype", "fp32", "--threads", "1"]) == 0
    assert main([*flags, "--dtype", "bf16", "--threads", "1", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("### fp32, 1 thread") < printed.index("### bf16, 1 thread")
    runs = json.loads(file.read_text())
    assert [one["dtype"] for one in runs] == ["bf16", "fp32"]
    assert [(p["kind"], p["batch"], p["tokens"]) for p in runs[0]["points"]] == [
        ("decode", 1, 32),
        ("decode", 2, 32),
        ("prefill", 1, 40),
    ]
    assert all(point["seconds"] > 0 for one in runs for point in one["points"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", [["--dtype", "fp7"], ["--threads", "0"], ["--model", "/nowhere"]])
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(flags)
    assert left.value.code == 2
    assert "error:" in capsys.readouterr().err
