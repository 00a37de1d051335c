"""The quality figures: windows of a text, divergences against their definitions, and the whole tool."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.engine.loaded_model import Model, load_model
from lab.quality.__main__ import main
from lab.quality.divergence import Sums, compare, judge
from lab.quality.measure import measure
from lab.quality.report import as_object, markdown, passes
from lab.quality.text import TooShort, python_reference, text_file, windows

ABOUT = {
    "model": "tiny",
    "backend": "native",
    "source": "a book",
    "licence": "CC0",
    "sha256": "ab" * 32,
    "windows": 3,
    "window": 8,
}


def test_windows_are_spread_over_the_text_and_never_overlap() -> None:
    pieces = windows(range(100), 4, 10)
    assert [piece[0] for piece in pieces] == [0, 30, 60, 90]
    assert all(len(piece) == 10 for piece in pieces)
    tight = windows(range(41), 4, 10)
    assert all(b[0] >= a[-1] + 1 for a, b in itertools.pairwise(tight))
    assert [list(piece) for piece in windows(range(10), 1, 10)] == [list(range(10))]


@pytest.mark.parametrize(
    ("count", "length", "error"), [(5, 21, TooShort), (0, 4, ValueError), (2, 1, ValueError)]
)
def test_windows_that_cannot_be(count: int, length: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        windows(range(100), count, length)


def test_the_python_reference_is_prose_and_always_the_same() -> None:
    first, again = python_reference(), python_reference()
    assert first.sha256 == again.sha256
    assert len(first.content) > 300_000
    assert "The interpreter" in first.content


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("Ein Satz – mit Strich.\n", encoding="utf-8")
    assert text_file(file).content == "Ein Satz – mit Strich.\n"


def test_figures_are_what_their_definitions_say() -> None:
    generator = torch.Generator().manual_seed(1)
    reference, candidate = torch.randn(2, 9, 30, generator=generator) * 3
    targets = [3, 0, 29, 7, 7]
    p, q = (one[:5].double().softmax(-1) for one in (reference, candidate))
    found = compare(reference, candidate, targets)
    rows = range(5)
    assert found.tokens == 5
    assert found.nll == pytest.approx(-sum(math.log(q[i, targets[i]]) for i in rows), rel=1e-5)
    assert found.reference_nll == pytest.approx(-sum(math.log(p[i, targets[i]]) for i in rows), rel=1e-5)
    assert found.divergence == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert found.agreed == sum(int(p[i].argmax()) == int(q[i].argmax()) for i in rows)


def test_a_model_beside_itself_is_perfect() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    quality = judge([compare(logits, logits, [1] * 6)])
    assert (quality.perplexity_ratio, quality.mean_kl, quality.top1_agreement) == (1.0, 0.0, 1.0)


def test_windows_are_weighed_by_their_tokens() -> None:
    few, many = Sums(10, 20.0, 21.0, 0.5, 9), Sums(90, 90.0, 99.0, 0.5, 80)
    quality = judge([few, many, Sums(0, 0.0, 0.0, 0.0, 0)])
    assert quality.tokens == 100
    assert quality.perplexity == pytest.approx(math.exp(1.2))
    assert quality.perplexity_ratio == pytest.approx(math.exp(0.1))
    assert quality.mean_kl == pytest.approx(0.01)
    assert quality.top1_agreement == pytest.approx(0.89)
    assert quality.ratio_error == pytest.approx(0.0, abs=1e-12), "both windows are 0.1 nats worse"
    with pytest.raises(ValueError, match="predicted"):
        judge([])


@pytest.mark.parametrize(("extra_nats", "verdict"), [(0.009, True), (0.011, False)])
def test_the_bar_is_one_percent(extra_nats: float, verdict: bool) -> None:
    quality = judge([Sums(100, 200.0, 200.0 + 100 * extra_nats, 1.0, 90)])
    assert passes(quality) is verdict
    assert ("**no**" in markdown({"int8": quality}, ABOUT)) is not verdict
    assert as_object({"int8": quality}, ABOUT)["precisions"]["int8"]["passes"] is verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=71,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_every_token_but_the_first_of_a_window_is_judged(folder: Path) -> None:
    """Windows longer than a chunk; the reference figures are transformers' own."""
    pieces = windows(
        torch.randint(0, 71, (600,), generator=torch.Generator().manual_seed(5)).tolist(), 3, 170
    )
    models: dict[str, Model] = {"fp32": load_model(folder, torch.float32)}
    models["bf16"] = load_model(folder, torch.bfloat16)
    seen: list[None] = []
    sums = measure(models, pieces, 1, lambda: seen.append(None))
    assert len(seen) == 3
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index, piece in enumerate(pieces):
        ids = torch.tensor([list(piece)])
        with torch.inference_mode():
            loss = float(oracle(ids, labels=ids).loss)
        for name in models:
            assert sums[name][index].tokens == 169
            assert sums[name][index].reference_nll / 169 == pytest.approx(loss, rel=1e-4)
    exact, rounded = judge(sums["fp32"]), judge(sums["bf16"])
    assert exact.mean_kl == 0.0
    assert 0.0 < rounded.mean_kl < 0.01
    assert 0.8 < rounded.top1_agreement < 1.0


def test_the_tool_from_text_to_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the bundled model and few tokens; bf16 passes on any text."""
    book, figures = tmp_path / "book.txt", tmp_path / "figures.json"
    book.write_text("It was a bright cold day in April, and the clocks were striking twelve. " * 20)
    flags = ["--windows", "2", "--window", "64", "--dtype", "bf16", "--threads", "1"]
    assert main([*flags, "--text", str(book), "--output-file", str(figures)]) == 0
    assert "| bf16 |" in capsys.readouterr().out
    (written,) = json.loads(figures.read_text())
    assert written["precisions"]["bf16"]["tokens"] == 126
    assert written["precisions"]["fp32"]["perplexity_ratio"] == 1.0


@pytest.mark.parametrize("flags", [["--window", "5000"], ["--model", "/nowhere"], ["--text", "/nowhere"]])
def test_what_cannot_be_measured_is_an_error_in_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(flags)
    assert left.value.code == 2
    assert "error:" in capsys.readouterr().err
