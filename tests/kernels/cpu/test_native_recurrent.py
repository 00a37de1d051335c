"""Recurrent layers in the native step: the torch meaning, and what becomes of states in a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.status import NativeError
from diptych.engine.backends.native.supports import supports
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape
from diptych.engine.sampling import SampleRow, SamplingParams
from kernels import int8_cache
from tests.forms import sampled
from tests.kernels.cpu.tiny_models import EVERY_SET, KINDS, shape_of, tokens_of, weights_of

SIZE = 5
"""Tokens of a block: no multiple of a register's lanes."""
HIDDEN = 100


def conv(taps: int = 3, bias: bool = False, **switches: Any) -> LayerShape:
    return LayerShape(**{"attention": False, **switches}, recurrent=ShortConvShape(HIDDEN, taps, bias))


def recurrent(shape: RecurrentShape, **switches: Any) -> LayerShape:
    return LayerShape(**{"attention": False, **switches}, recurrent=shape)


BOTH = conv(3, attention=True)
DELTA = DeltaShape(2, 6, 24, 10, 4)
SHAPES: dict[str, ModelShape] = {
    "convolutions": shape_of(layers=(conv(), LayerShape(), conv(4, bias=True), conv(1))),
    "a convolution last": shape_of(layers=(LayerShape(), conv(16))),
    "both in a layer": shape_of(layers=(BOTH, conv(2, attention=True)), residual_scale=0.7),
    "both, and norms around": shape_of(layers=(BOTH, conv(2)), norms="around"),
    "norms of a layer's own": shape_of(layers=(conv(3), LayerShape(norms="after"), conv(2))),
    "parts of layers": shape_of(
        layers=(
            conv(3, feed_forward=False),
            LayerShape(attention=False),
            LayerShape(feed_forward=False),
            LayerShape(attention=False),
        )
    ),
    "a convolution alone last": shape_of(layers=(LayerShape(), conv(3, feed_forward=False))),
    "experts": shape_of(
        layers=(conv(3, experts=True), LayerShape(experts=True), LayerShape(attention=False, experts=True)),
        experts=ExpertsShape(num_experts=4, experts_per_token=2, intermediate_size=72),
    ),
    "every kind": shape_of(
        layers=(
            recurrent(DELTA),
            recurrent(SpaceShape(4, 11, 2, 19, 3), attention=True),
            recurrent(ScanShape(70, 9, 4, 13)),
            LayerShape(),
        ),
    ),
    "a delta rule last": shape_of(
        layers=(LayerShape(), recurrent(replace(DELTA, apart=True, norm_eps=1e-3, largest_rate=2.0))),
        attention_gate=True,
    ),
    "states of spaces": shape_of(
        layers=(
            LayerShape(),
            recurrent(SpaceShape(3, 8, 1, 33, 4, norm="none", conv_bias=False, out_bias=True), experts=True),
            recurrent(
                SpaceShape(3, 8, 3, 5, 1, norm="before_gate", step_bounds=(0.2, 0.7), in_bias=True),
                feed_forward=False,
            ),
        ),
        gated=False,
        activation="relu2",
        experts=ExpertsShape(4, 2, 40, gated=False, shared_size=24),
    ),
    "a scan last": shape_of(layers=(LayerShape(), recurrent(ScanShape(96, 16, 2, 7, bias=True)))),
    "windows": shape_of(layers=(conv(3), LayerShape(7), conv(3))),
}
SAMPLE = ["convolutions", "every kind"]
PLAIN = SHAPES["convolutions"]
TEXT = tokens_of(60)


@dataclass
class Text:
    """A text in blocks of its own, of which untouched ones hold NaN."""

    shape: ModelShape
    dtype: torch.dtype = torch.float32
    tokens: Sequence[int] = tuple(TEXT)
    memory: KVMemory = field(init=False)

    def __post_init__(self) -> None:
        layout = kv_layout(self.shape, self.dtype, SIZE if self.dtype != int8_cache.DTYPE else 16)
        self.memory = KVMemory(layout, own_blocks(layout, len(self.tokens)))
        self.memory.blocks.fill_(0xFF)
        self.table, self.pages = own_tables(layout, range(self.memory.num_blocks))

    def step(self, start: int, end: int, trailing: int | None = None) -> SequenceStep:
        part = self.tokens[start:end]
        rows = len(part) if trailing is None else trailing
        return SequenceStep(
            self.memory, self.table, start, part, rows > 0, trailing=rows, window_tables=self.pages
        )

    def page_blocks(self) -> torch.Tensor:
        """Return copies of all blocks with states."""
        return self.memory.blocks[[block for table in self.pages for block in table]].clone()


def backend_of(shape: ModelShape = PLAIN, kind: str = "fp32", name: str | None = None) -> NativeBackend:
    _, dtype, make = KINDS[kind]
    return NativeBackend(shape, make(shape), dtype, name)


def mixed(shape: ModelShape, backend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Three texts: prompts in chunks across places, then single tokens beside chunks, and few rows wanted."""
    a, b, c = (Text(shape, dtype, tokens) for tokens in (TEXT, TEXT[::-1], [3, *TEXT[1:]]))
    return [
        backend.forward([a.step(0, 17), b.step(0, 3, 0), c.step(0, 1)], None),
        backend.forward([a.step(17, 18), b.step(3, 20, 2), c.step(1, 2)], None),
        backend.forward([a.step(18, 19), b.step(20, 21), c.step(2, 30, 1)], None),
        backend.forward([c.step(30, 31), a.step(19, 60, 3), b.step(21, 22, 0)], None),
        backend.forward([c.step(31, 36), b.step(22, 23)], None),
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_fp32_steps_equal_the_torch_backend(name: str) -> None:
    shape = SHAPES[name]
    assert supports(shape) is None
    native = backend_of(shape)
    native.set_threads(2)
    expected = mixed(shape, TorchBackend(shape, weights_of(shape, torch.float32)), torch.float32)
    for want, got in zip(expected, mixed(shape, native, torch.float32), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "instructions"), EVERY_SET, ids=str)
@pytest.mark.parametrize("name", sampled(SHAPES, SAMPLE))
def test_every_instruction_set_and_kind_of_matrix_equals_the_torch_backend(
    name: str, kind: str, instructions: str
) -> None:
    shape = SHAPES[name]
    _, dtype, make = KINDS[kind]
    meaning = TorchBackend(shape, make(shape))
    expected = mixed(shape, meaning, dtype)
    for want, got in zip(expected, mixed(shape, backend_of(shape, kind, instructions), dtype), strict=True):
        if kind == "fp32":
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        else:
            error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
            assert error < 0.06, error


def bits(
    backend: NativeBackend, shape: ModelShape, dtype: torch.dtype, cut: int = 60, beside: int = 0
) -> torch.Tensor:
    """Return the logits after a text, and its last page, however it is cut and whatever is beside it."""
    text, others = Text(shape, dtype), [Text(shape, dtype, tokens_of(60, seed=7 + n)) for n in range(beside)]
    for call, start in enumerate(range(0, 60, cut)):
        neighbours = [other.step(2 * call, 2 * call + 2) for other in others]
        logits = backend.forward([*neighbours, text.step(start, min(start + cut, 60), 1)], None)[-1:]
    page = text.memory.blocks[[table[-1] for table in text.pages]]
    return torch.cat([logits.flatten().view(torch.int32), page.flatten().view(torch.int32)])


@pytest.mark.parametrize(("kind", "instructions"), EVERY_SET, ids=str)
@pytest.mark.parametrize("name", ["both in a layer", "every kind"])
def test_bits_depend_neither_on_cuts_nor_on_neighbours_nor_on_threads(
    name: str, kind: str, instructions: str
) -> None:
    shape, dtype = SHAPES[name], KINDS[kind][1]
    backend = backend_of(shape, kind, instructions)
    expected = bits(backend, shape, dtype)
    for threads, cut, beside in ((2, 60, 0), (3, 7, 0), (1, 1, 0), (2, 60, 3), (2, 7, 2)):
        backend.set_threads(threads)
        assert torch.equal(bits(backend, shape, dtype, cut, beside), expected), (threads, cut, beside)
    reversed_text = Text(shape, dtype, TEXT[::-1])
    other = backend.forward([reversed_text.step(0, 60, 1)], None).view(torch.int32).flatten()
    assert not torch.equal(other, expected[: len(other)]), "the control: another text has other bits"


def test_states_lie_where_torch_looks_for_them() -> None:
    """Either backend goes on with pages of the other; a text that begins elsewhere does not."""
    torchs, native = TorchBackend(PLAIN, weights_of(PLAIN, torch.float32)), backend_of()
    whole = torchs.forward([Text(PLAIN).step(0, 60)], None)
    for first, second in ((torchs, native), (native, torchs)):
        for at in (4, 5, 6, 31):
            text = Text(PLAIN)
            first.forward([text.step(0, at)], None)
            got = second.forward([text.step(at, 60)], None)
            torch.testing.assert_close(got, whole[at:], rtol=1e-4, atol=1e-4)


def test_a_ring_of_two_pages_holds_a_prompt() -> None:
    """Places by turns in two pages: a chunk keeps what its last two places have."""
    native = backend_of()
    expected = native.forward([Text(PLAIN).step(0, 60)], None)
    text, rows = Text(PLAIN), []
    text.pages = tuple([table[place % 2] for place in range(len(table))] for table in text.pages)
    for start in range(0, 60, 13):
        rows.append(native.forward([text.step(start, min(start + 13, 60))], None))
    assert torch.equal(torch.cat(rows), expected)
    text.pages = tuple([table[0]] * len(table) for table in text.pages)
    assert native.forward([text.step(7, 8)], None).isnan().all(), "the control: that page is gone"


def test_an_aborted_sequence_leaves_its_pages_as_they_are() -> None:
    native, texts, words = backend_of(), [Text(PLAIN), Text(PLAIN, tokens=TEXT[::-1])], AbortWords(2)
    native.forward([text.step(0, 10) for text in texts], None)
    before = [text.page_blocks() for text in texts]
    words.abort(0)
    found = native.forward([text.step(10, 27, 1) for text in texts], words)
    assert found.isnan().all(dim=1).tolist() == [True, False]
    assert torch.equal(texts[0].page_blocks(), before[0])
    assert not torch.equal(texts[1].page_blocks(), before[1])
    expected = backend_of().forward([Text(PLAIN).step(0, 27, 1)], None)
    assert torch.equal(native.forward([texts[0].step(10, 27, 1)], None), expected)
    words.abort(1)
    after = texts[1].page_blocks()
    assert native.forward([text.step(27, 28) for text in texts], words).isnan().all()
    assert torch.equal(texts[1].page_blocks(), after)


def test_states_of_another_count_fail_their_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    native, right, wrong = backend_of(), Text(PLAIN), Text(PLAIN, tokens=TEXT[::-1])
    native.forward([text.step(0, 11) for text in (right, wrong)], None)
    before = wrong.page_blocks()
    at = 11
    for start in (9, 12, 4):
        found = native.forward([wrong.step(start, start + 3, 1), right.step(at, at + 1)], None)
        assert found.isnan().all(dim=1).tolist() == [True, False]
        assert torch.equal(wrong.page_blocks(), before)
        at += 1
    assert caplog.text.count("rows [0] of a step read recurrent states that are not those before them") == 3
    greedy = [SampleRow(SamplingParams(temperature=0.0), (), ())] * 2
    drawn = native.forward_and_sample([wrong.step(2, 3), right.step(at, at + 1)], greedy, None)
    assert [hasattr(token, "token_id") for token in drawn.tokens] == [False, True]
    expected = backend_of().forward([Text(PLAIN, tokens=TEXT[::-1]).step(0, 12, 1)], None)
    assert torch.equal(native.forward([wrong.step(11, 12)], None), expected)


REFUSED = {
    "reads the page of place 2, they begin at 3": {"window_first": 3},
    "windowed block 999 of": {"window_tables": "beyond"},
    "windowed blocks from 0 on": {"window_tables": "short"},
    "no trees of tokens": {"parents": [-1, 0, 0]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(message: str) -> None:
    native, text = backend_of(), Text(PLAIN)
    native.forward([text.step(0, 12)], None)
    before = text.memory.blocks.clone()
    changes: dict[str, Any] = dict(REFUSED[message])
    if changes.get("window_tables") == "beyond":
        changes["window_tables"] = tuple([999] * len(table) for table in text.pages)
    elif changes.get("window_tables") == "short":
        changes["window_tables"] = tuple(table[:2] for table in text.pages)
    elif "window_first" in changes:
        changes["window_tables"] = tuple(table[3:] for table in text.pages)
    with pytest.raises(NativeError, match=message):
        native.forward([replace(text.step(12, 15), **changes)], None)
    assert torch.equal(text.memory.blocks, before)
    assert native.forward([text.step(12, 15)], None).isfinite().all()


def test_keys_in_int8_lie_beside_states_in_float32() -> None:
    dtype, shape = int8_cache.DTYPE, SHAPES["convolutions"]
    weights = weights_of(shape, torch.float32)
    native = NativeBackend(shape, weights, torch.float32, kept=dtype)
    exact = backend_of(shape).forward([Text(shape).step(0, 60)], None)
    text = Text(shape, dtype)
    got = torch.cat([native.forward([text.step(start, start + 10)], None) for start in range(0, 60, 10)])
    error = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.05


def test_no_step_is_launched_ahead_of_a_state() -> None:
    """A token that follows the last one of an answer would be in the answer's states."""
    greedy, text = [SampleRow(SamplingParams(temperature=0.0), (), ())], Text(PLAIN)
    native, plain = backend_of(), shape_of()
    assert native.launch([text.step(0, 1)], greedy, None) is None
    assert NativeBackend(plain, weights_of(plain, torch.float32), torch.float32).launch(
        [Text(plain).step(0, 1)], greedy, None
    )


def test_what_the_step_lacks_is_named() -> None:
    assert backend_of().allow_adapters(1, 8) is None
    assert backend_of().lacks_trees() == "a recurrent layer knows no trees of tokens"
    assert supports(shape_of(layers=(conv(17), LayerShape()))) == "convolutions over more than 16 tokens"
