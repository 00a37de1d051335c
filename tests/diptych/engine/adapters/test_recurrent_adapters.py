"""Adapters of models with recurrent layers against transformers with merged weights, in mixed steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.adapters import modules
from diptych.engine.adapters.adapter import Adapter, BadAdapter
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.supports import supports
from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Checkpoint
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.engine.weights.rows import rows_of
from tests.adapters import merged, write_adapter
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.models import test_lfm2 as lfm2
from tests.diptych.engine.models.family_models import Stepper, oracle_logits, randomise, text_of
from tests.diptych.engine.models.recurrent_models import CASES, config_of, oracle_of, save

EXACT = 2e-4
"""Largest difference of a logit in float32."""
SHOWS = 1e-2
"""Least difference of some logit where an adapter's part is left out."""
_ELSEWHERE = re.compile(r".*(experts?\b|router|\.gate$|shared_expert)")
"""Linear modules of layers that can have no change."""
SAMPLE = frozenset({"lfm2", "qwen3-next", "falcon-h1", "jamba"})
"""Cases of every kind of recurrence."""

QWEN = shape_from_config(resolve_config(config_of("qwen3-next").to_dict()), tied=False)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Adaptable:
    """The modules of a transformers model that can be adapted."""

    model: Any

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        experts = getattr(self.model.config, "num_local_experts", 0)
        for name, module in self.model.named_modules():
            if ".layers." in name and not _ELSEWHERE.match(name) and not (experts and "shared_mlp" in name):
                yield name, module


@dataclass(frozen=True)
class Case:
    """A model, and two adapters of all that can be adapted of it."""

    oracle: Any
    checkpoint: Checkpoint
    folders: tuple[Path, Path]

    def merged(self, slot: int | None) -> Any:
        """Return transformers' model with an adapter's weights merged, or as it is."""
        return self.oracle if slot is None else merged(self.oracle, self.folders[slot])

    def adapter(self, slot: int = 0) -> Adapter:
        return read_adapter(self.folders[slot], self.checkpoint.shape, 64)


def oracle_named(name: str) -> Any:
    if name != "lfm2":
        return oracle_of(name)
    torch.manual_seed(11)
    config = lfm2.Lfm2Config(**lfm2.SIZES, **lfm2.CASES["biased"], num_hidden_layers=3)
    oracle = lfm2.Lfm2ForCausalLM(config).eval()
    randomise(oracle)
    return oracle


def write(folder: Path, oracle: Any, seed: int, rank: int) -> Path:
    """Write an adapter of each module that can be adapted, named as a whole."""
    of = Adaptable(oracle)
    names = [name for name, module in of.named_modules() if isinstance(module, torch.nn.Linear)]
    ends = sorted({name.rpartition(".")[2] for name in names})
    return write_adapter(folder, of, seed=seed, rank=rank, targets=ends, target_modules=names, strength=0.5)


@pytest.fixture(
    scope="module",
    params=[
        name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in ("lfm2", *CASES)
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    oracle, root = oracle_named(request.param), tmp_path_factory.mktemp(request.param)
    folders = write(root / "one", oracle, 1, 4), write(root / "other", oracle, 2, 7)
    return Case(oracle, read_checkpoint(save(oracle, root / "model"), "fp32"), folders)


def torch_of(checkpoint: Checkpoint) -> TorchBackend:
    return TorchBackend(checkpoint.shape, checkpoint.weights)


def native_of(checkpoint: Checkpoint) -> NativeBackend:
    return NativeBackend(checkpoint.shape, checkpoint.weights, torch.float32)


def device_of(checkpoint: Checkpoint) -> TritonBackend:
    if (why := supports(checkpoint.shape)) is not None:
        pytest.skip(why)
    return TritonBackend(checkpoint.shape, checkpoint.weights, "cpu", REFERENCE_OPERATORS)


BACKENDS = {"torch": torch_of, "native": native_of, "triton": device_of}
EVERY = pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
SAMPLED = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[] if name == "native" else pytest.mark.full)
        for name, make in BACKENDS.items()
    ],
)


def with_adapters(backend: Any, *adapters: Adapter) -> Any:
    assert backend.allow_adapters(len(adapters), 64) is None
    for slot, adapter in enumerate(adapters):
        backend.set_adapter(slot, backend.prepare_adapter(adapter))
    return backend


def mixed_logits(
    backend: Any, shape: ModelShape, texts: Sequence[Sequence[int]], slots: Sequence[int | None], chunk: int
) -> list[torch.Tensor]:
    """Return the logits after each token of texts of one length that step together, `[tokens, vocab]`."""
    stepper = Stepper(backend, shape)
    tables = [stepper.tables(len(text)) for text in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for start in range(0, len(texts[0]), chunk):
        parts = [list(text[start : start + chunk]) for text in texts]
        steps = [
            stepper.step(table, start, part, wants_logits=True, trailing=len(part), adapter=slot)
            for table, part, slot in zip(tables, parts, slots, strict=True)
        ]
        for own, found in zip(rows, backend.forward(steps, None).split(len(parts[0])), strict=True):
            own.append(found.clone())
    return [torch.cat(own) for own in rows]


@EVERY
def test_logits_of_mixed_rows_are_those_of_merged_weights(case: Case, make: Any) -> None:
    shape = case.checkpoint.shape
    backend = with_adapters(make(case.checkpoint), case.adapter(0), case.adapter(1))
    texts, slots = [text_of(40, seed=seed) for seed in (1, 2, 3)], (0, None, 1)
    expected = [oracle_logits(case.merged(slot), text) for slot, text in zip(slots, texts, strict=True)]
    for chunk in (17, 1):
        found = mixed_logits(backend, shape, texts, slots, chunk)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=EXACT, rtol=1e-4)
    swapped = mixed_logits(backend, shape, texts, (1, None, 0), 17)
    assert all((swapped[number] - expected[number]).abs().max() > SHOWS for number in (0, 2))


@SAMPLED
def test_greedy_tokens_of_mixed_rows_are_those_of_merged_weights(case: Case, make: Any) -> None:
    shape, count = case.checkpoint.shape, 12
    backend = with_adapters(make(case.checkpoint), case.adapter(0), case.adapter(1))
    prompts, slots = [text_of(9 + 5 * seed, seed=seed) for seed in range(3)], (None, 0, 1)
    found = Stepper(backend, shape).greedy(prompts, count, slots)
    for text, prompt, slot in zip(found, prompts, slots, strict=True):
        wanted = oracle_logits(case.merged(slot), text)[len(prompt) - 1 : -1].argmax(dim=-1)
        assert text[len(prompt) :] == wanted.tolist()
    other = Stepper(backend, shape).greedy(prompts, count, (0, 1, None))
    assert all(one != text for one, text in zip(other, found, strict=True)), "swapped adapters should show"


@SAMPLED
def test_each_matrix_left_out_shows(case: Case, make: Any) -> None:
    """And so do rows in the order of the file, and matrices without their factors."""
    whole, shape, text = case.adapter(), case.checkpoint.shape, text_of(40)
    [exact] = mixed_logits(with_adapters(make(case.checkpoint), whole), shape, [text], [0], 40)
    for field in sorted({field for layer in whole.layers for field in layer}):
        layers = [dict(layer) for layer in whole.layers]
        for layer in layers:
            layer.pop(field, None)
        fewer = Adapter(tuple(layers))
        [logits] = mixed_logits(with_adapters(make(case.checkpoint), fewer), shape, [text], [0], 40)
        assert (logits - exact).abs().max() > SHOWS / 10, field


def test_rows_in_the_files_order_and_matrices_without_factors_show(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = case.adapter()

    def plain(stored: Any, name: str, shape: ModelShape, size: tuple[int, ...], *, interleaved: bool) -> Any:
        return rows_of(replace(stored, rows=None), name, shape, size, interleaved=interleaved)

    monkeypatch.setattr(modules, "rows_of", plain)
    wrong = case.adapter()
    differing = {
        field
        for right, other in zip(whole.layers, wrong.layers, strict=True)
        for field, one in right.items()
        if not torch.equal(one.b, other[field].b)
    }
    interleaved = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    assert bool(differing) == (case.checkpoint.shape.family in interleaved)
    if case.checkpoint.shape.family == "qwen3_next":
        assert {"q", "q_gate", "recurrent.qkv_proj", "recurrent.gate_proj", "recurrent.rate"} <= differing
    text = text_of(40)
    if differing:
        exact = oracle_logits(case.merged(0), text)
        backend = with_adapters(torch_of(case.checkpoint), wrong)
        [logits] = mixed_logits(backend, case.checkpoint.shape, [text], [0], 40)
        assert (logits - exact).abs().max() > SHOWS


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("conv1d", "target_modules: 'conv1d' cannot be adapted here"),
        ("A_log", "target_modules: 'A_log' cannot be adapted here"),
        ("dt_bias", "target_modules: 'dt_bias' cannot be adapted here"),
        ("shared_expert_gate", "target_modules: 'shared_expert_gate' cannot be adapted here"),
        ("x_proj", "target_modules: 'x_proj' matches no module of this model"),
    ],
)
def test_targets_that_are_no_matrices_of_the_model_are_refused(
    target: str, message: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, oracle_of("qwen3-next"), seed=1, targets=["q_proj"])
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('["q_proj"]', f'["q_proj", "{target}"]'))
    with pytest.raises(BadAdapter, match=message):
        read_adapter(folder, QWEN, 64)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("linear_attn.conv1d", "conv1d.lora_A.weight: adapters of convolutions are not computed"),
        ("mlp.shared_expert.up_proj", "up_proj.lora_A.weight: adapters of experts are not computed"),
        ("mlp.gate", "mlp.gate.lora_A.weight: its module cannot be adapted here"),
        ("linear_attn.x_proj", "x_proj.lora_A.weight: the model has no such module that can be adapted"),
    ],
)
def test_tensors_of_what_is_not_computed_are_refused(module: str, message: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, oracle_of("qwen3-next"), seed=1, targets=["q_proj"])
    path = folder / "adapter_model.safetensors"
    extra = {f"base_model.model.model.layers.0.{module}.lora_A.weight": torch.ones(4, 8)}
    save_file({**load_file(path), **extra}, path)
    with pytest.raises(BadAdapter, match=message):
        read_adapter(folder, QWEN, 64)
