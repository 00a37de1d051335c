"""Products of a layer's experts in the codes of files: each beside its bytes and beside bf16.

Layers are those of gpt-oss-20b and Qwen3-30B-A3B. What a step has to read depends on what was chosen: the
limit counts the experts that any row chose. Each kind is held against the meaning first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products.experts import DenseExperts, ExpertProduct, expert_product
from diptych.engine.weights import Matrix
from kernels import packed_matrix
from kernels.packed_matrix import PackedMatrix, from_blocks, pack
from kernels.packed_stack import as_codes
from kernels.quantised_linear import BlockMatrix
from kernels.scaled_matrix import FP8, ScaledMatrix
from lab.gpu.ceilings import READ
from lab.gpu.section import Context, Figure, Unmeasured, figure
from lab.gpu.timing import measure

SECTION = "quantised"
_ROWS = (1, 16, 64, 2048)
_MOST_ERROR = 0.01
_CHECKED = 4
"""Rows that are held against the meaning."""


@dataclass(frozen=True)
class _Layer:
    """Sizes of a layer of experts."""

    name: str
    experts: int
    chosen: int
    hidden: int
    inner: int


_GPT_OSS = _Layer("gpt-oss-20b", 32, 4, 2880, 2880)
_QWEN = _Layer("Qwen3-30B-A3B", 128, 8, 2048, 768)
_DRY = _Layer("a small layer", 4, 2, 128, 128)
Make = Callable[[int, int], Matrix]


def expert_figures(context: Context, device: torch.device, operators: Operators) -> Iterator[Figure]:
    """Yield figures of each kind of experts' matrices; needs the read bandwidth."""
    for layer, name, make in (
        (_GPT_OSS, "MXFP4", _mxfp4),
        (_QWEN, "4 bits", _four_bits),
        (_QWEN, "FP8", _fp8),
    ):
        yield from _kind(context, context.pick(layer, layer, _DRY), name, make, device, operators)


def _kind(
    context: Context, layer: _Layer, name: str, make: Make, device: torch.device, operators: Operators
) -> Iterator[Figure]:
    context.say(f"experts in {name}: making a layer of {layer.name}")
    # Speed does not ask what codes say: all experts have those of one, and codes of another are elsewhere.
    both, down = make(2 * layer.inner, layer.hidden), make(layer.hidden, layer.inner)
    ours = [expert_product(device, [(one,)] * layer.experts, []) for one in (both, down)]
    full = [
        DenseExperts(
            torch.randn(layer.experts, *one.shape, device=device, dtype=torch.bfloat16).mul_(
                one.shape[1] ** -0.5
            ),
            None,
        )
        for one in (both, down)
    ]
    numbers = [packed_matrix.dequantise(as_codes(one)) for one in (both, down)]
    for rows in context.pick(_ROWS, (1, 2048), (2,)):
        yield _figure(context, layer, name, rows, ours, full, numbers, operators)


def _figure(
    context: Context,
    layer: _Layer,
    name: str,
    rows: int,
    ours: list[ExpertProduct],
    full: list[DenseExperts],
    numbers: list[torch.Tensor],
    operators: Operators,
) -> Figure:
    context.say(f"experts in {name}: {rows} rows")
    device = full[0].weight.device
    x = torch.randn(rows, layer.hidden, device=device).bfloat16()
    router = torch.randn(layer.experts, layer.hidden, device=device) * layer.hidden**-0.5
    routed = operators.make_routed(rows, layer.experts, layer.chosen, device)
    routed = operators.route_experts(x, router, None, None, out=routed, count=layer.chosen)
    pairs = rows * layer.chosen
    inner = torch.empty(pairs, layer.inner, device=device).bfloat16()
    parts = torch.empty(pairs, layer.hidden, device=device).bfloat16()

    def run(products: list[ExpertProduct]) -> None:
        products[0].gated(operators, x, routed, out=inner)
        products[1].multiply(operators, inner, routed, out=parts)

    run(ours)
    _check(context, f"experts in {name}, {rows} rows", x, parts, layer.chosen, numbers)
    times = measure(context, {"ours": partial(run, ours), "bf16": partial(run, list(full))})
    mine, other = times["ours"], times["bf16"]
    used = len(routed.experts.unique())
    nbytes = sum(product.nbytes for product in ours) * used / layer.experts
    limit = nbytes / context.needs(READ)
    return figure(
        SECTION, f"experts of {layer.name} in {name}, {rows} rows", mine.median_s * 1e6, "µs",
        against="bf16", ratio=other.median_s / mine.median_s,
        note=f"{limit * 1e6:.0f} µs by the bytes of {used} experts, bf16 {other.median_s * 1e6:.0f} µs, "
        f"{mine.note()}",
    )  # fmt: skip


def _check(
    context: Context,
    what: str,
    x: torch.Tensor,
    parts: torch.Tensor,
    chosen: int,
    numbers: list[torch.Tensor],
) -> None:
    """Hold the first rows' contributions against the meaning. Raises Unmeasured."""
    both, down = (one.bfloat16().float() for one in numbers)
    gate, up = (x[:_CHECKED].float().cpu() @ both.T).bfloat16().float().chunk(2, dim=1)
    act = torch.nn.functional.silu(gate).bfloat16().float()
    expected = ((act * up).bfloat16().float() @ down.T).repeat_interleave(chosen, 0)
    wrong = float((parts[: len(expected)].float().cpu() - expected).norm() / expected.norm())
    if wrong > (1.0 if context.dry else _MOST_ERROR):  # the interpreter cuts bfloat16 off
        raise Unmeasured(f"{what}: {wrong:.3g} of the norm away from the meaning")


def _mxfp4(rows: int, columns: int) -> PackedMatrix:
    blocks = torch.randint(0, 256, (rows, columns // 32, 17), dtype=torch.uint8)
    blocks[..., 0] = 127 - (columns.bit_length() + 3) // 2  # activations stay about one
    found = from_blocks(BlockMatrix("mxfp4", columns, blocks.flatten(1)))
    assert found is not None
    return found


def _four_bits(rows: int, columns: int) -> PackedMatrix:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scales = torch.rand(rows, columns // 128).mul_(0.2 * columns**-0.5).half()
    found = pack("int4", codes, scales, 128, zeros=torch.randint(6, 10, scales.shape))
    assert found is not None
    return found


def _fp8(rows: int, columns: int) -> ScaledMatrix:
    scales = torch.rand(-(-rows // 128), -(-columns // 128)).mul_(columns**-0.5)
    return ScaledMatrix(torch.randn(rows, columns).to(FP8), scales, squares=True)
