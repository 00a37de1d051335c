"""Compiles every Triton kernel for Hopper on a machine without a GPU.

Run as a program; `recurrent` compiles the kernels of recurrent layers alone, `sm_80` for Ampere. A driver
that only says what the target is stands in for CUDA's; the launchers run as they are, up to the launch.
Prints a line per compiled kernel: its name, registers, bytes spilled, shared memory, the widest global loads,
and the matrix instructions it is made of. Exits with an error if one does not compile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

TARGET = GPUTarget("cuda", 80 if "sm_80" in sys.argv else 90, 32)


class TargetOnly(DriverBase):  # type: ignore[misc]
    """Enough of a driver to compile with."""

    def __init__(self) -> None:
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=0: 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def report(name: str, kernel: Any) -> None:
    """Print a line of what a kernel was compiled to."""
    ptx = kernel.asm["ptx"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    used = " ".join(re.findall(r"(?:REG|STACK|LOCAL):\d+", told.stdout))
    copies = Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (?:0x)?(\d+)", ptx))
    loads = Counter(re.findall(r"ld\.global[.\w:]*", ptx))
    stores = Counter(re.findall(r"st\.global[.\w:]*", ptx))
    matrix = Counter(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[.\w]*", ptx))
    print(f"{name}: {used} SHARED:{kernel.metadata.shared}")
    rounded = Counter(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx))
    for what, forms in (("cp.async", copies), ("", loads), ("", stores), ("", matrix), ("", rounded)):
        if forms:
            print("   ", what, ", ".join(f"{count} x {form}" for form, count in forms.items()), flush=True)


def compile_instead_of_launching() -> None:
    """Compile and report a kernel wherever it is launched, from here on."""
    triton.runtime.driver.set_active(TargetOnly())
    run = triton.runtime.JITFunction.run
    seen: set[str] = set()

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            report(self.fn.__name__, kernel)
        return kernel

    triton.runtime.JITFunction.run = compiled


def cases(quick: bool) -> list[tuple[str, Callable[[], object]]]:
    """Every launcher at the shapes that matter, by name."""
    from kernels.convert_blocks import HeadRange, block_major, token_major
    from kernels.gpu.adapted_linear import adapted_linear
    from kernels.gpu.change_table import ChangeTable
    from kernels.gpu.convert_blocks import convert_blocks
    from kernels.gpu.copy_blocks import copy_blocks
    from kernels.gpu.decode_rotary import FreshRows
    from kernels.gpu.expert_linear import expert_linear, expert_swiglu, sum_experts
    from kernels.gpu.fp8_prefill import fp8_prefill
    from kernels.gpu.norm_round import norm_round
    from kernels.gpu.packed_experts import packed_expert_linear, packed_expert_swiglu
    from kernels.gpu.packed_linear import packed_linear, unpack
    from kernels.gpu.paged_decode import paged_decode
    from kernels.gpu.paged_prefill import paged_prefill
    from kernels.gpu.rms_norm import add_rms_norm, rms_norm
    from kernels.gpu.rotary_write import rotary_write
    from kernels.gpu.round_rows import round_rows
    from kernels.gpu.route_experts import RoutedRows, route_experts
    from kernels.gpu.sample import sample
    from kernels.gpu.scaled_linear import scaled_linear
    from kernels.gpu.skinny_linear import skinny_linear, skinny_swiglu
    from kernels.gpu.sum_parts import sum_parts, sum_parts_rms_norm
    from kernels.gpu.swiglu import swiglu
    from kernels.gpu.swiglu_round import swiglu_round
    from kernels.packed_matrix import from_blocks, pack
    from kernels.packed_stack import stack
    from kernels.quantised_linear import BlockMatrix
    from kernels.scaled_matrix import ScaledMatrix
    from tests.kernels.gpu.recurrent_cases import recurrent_cases

    made: list[tuple[str, Callable[[], object]]] = []

    def attention(
        heads: int, kv_heads: int, head_dim: int, size: int, dtype: torch.dtype, kept: torch.dtype
    ) -> None:
        name = f"{heads}/{kv_heads}x{head_dim} block {size} {dtype} {kept}"
        blocks = torch.zeros(4, 2, 2, kv_heads, head_dim * size).to(kept)
        scales = torch.ones(2, 2, kv_heads) if kept.itemsize == 1 else None
        query = torch.zeros(16, heads, head_dim, dtype=dtype)
        tables = torch.zeros(16, 64, dtype=torch.int32)
        lengths = torch.ones(17, dtype=torch.int32)
        made.append(
            (f"decode {name}", lambda: paged_decode(query, blocks, 1, tables, lengths[:16], scales=scales))
        )
        sinks = torch.zeros(heads)
        made.append(
            (
                f"decode with cap and sinks {name}",
                lambda: paged_decode(
                    query, blocks, 1, tables, lengths[:16], cap=9.0, sinks=sinks, window=32, scales=scales
                ),
            )
        )
        made.append(
            (
                f"prefill with cap and sinks {name}",
                lambda: paged_prefill(
                    query, blocks, 1, tables, lengths[:16], lengths, max_tokens=9, cap=9.0, sinks=sinks
                ),
            )
        )
        made.append(
            (
                f"prefill {name}",
                lambda: paged_prefill(
                    query, blocks, 1, tables, lengths[:16], lengths, max_tokens=9, scales=scales
                ),
            )
        )
        made.append(
            (
                f"prefill of gathered keys {name}",
                lambda: paged_prefill(
                    query, blocks, 1, tables, lengths[:16], lengths, max_tokens=4096, scales=scales
                ),
            )
        )
        new = FreshRows(
            torch.zeros(16, heads + 2 * kv_heads, head_dim, dtype=dtype), *torch.zeros(2, 16, head_dim // 2),
            torch.zeros(16, dtype=torch.int64), lengths[:16], query[0, 0], query[0, 0],
        )  # fmt: skip
        made.append(
            (
                f"decode that rotates and writes {name}",
                lambda: paged_decode(
                    query, blocks, 1, tables, lengths[:16], scales=scales, fresh=new, window=80
                ),
            )
        )
        made.append(
            (
                f"decode joined apart {name}",
                lambda: paged_decode(query, blocks, 1, tables, lengths[:16], scales=scales, apart=True),
            )
        )
        if kept == torch.float8_e4m3fn and scales is not None:
            made.append(
                (
                    f"decode in FP8 {name}",
                    lambda: paged_decode(query, blocks, 1, tables, lengths[:16], scales=scales, eight=True),
                )
            )
            for what, rule in (
                ("", {}),
                (" with window, cap and sinks", {"window": 80, "cap": 9.0, "sinks": sinks}),
            ):
                made.append(
                    (
                        f"prefill with products of FP8{what} {name}",
                        lambda rule=rule: fp8_prefill(
                            query,
                            blocks,
                            1,
                            tables,
                            lengths[:16],
                            lengths,
                            max_tokens=9,
                            scales=scales,
                            **rule,
                        ),
                    )
                )
        tree = torch.zeros(16, 2, dtype=torch.int64)
        made.append(
            (
                f"prefill of trees {name}",
                lambda: paged_prefill(
                    query, blocks, 1, tables, lengths[:16], lengths, max_tokens=9, window=80, tree=tree
                ),
            )
        )
        base = torch.zeros(2, dtype=torch.int64)
        made.append(
            (
                f"prefill of a memory found through the device {name}",
                lambda: paged_prefill(
                    query, blocks, 1, tables, lengths[:16], lengths, max_tokens=9, scales=scales, base=base
                ),
            )
        )
        qkv = torch.zeros(200, heads + 2 * kv_heads, head_dim, dtype=dtype)
        half = torch.zeros(200, head_dim // 2, dtype=dtype)
        ids, lanes, norm = (
            torch.zeros(200, dtype=torch.int64),
            torch.zeros(200, dtype=torch.int32),
            torch.zeros(head_dim, dtype=dtype),
        )
        for count in (1, 200):
            made.append(
                (
                    f"rotary {count} {name}",
                    lambda count=count: rotary_write(
                        qkv[:count],
                        half[:count],
                        half[:count],
                        blocks,
                        1,
                        ids[:count],
                        lanes[:count],
                        heads=heads,
                        kv_heads=kv_heads,
                        q_norm=norm,
                        k_norm=norm,
                        eps=1e-6,
                        scales=scales,
                    ),
                )
            )

    def part_of_blocks(heads: int, kv_heads: int, head_dim: int) -> None:
        """A rank's heads and layers of blocks with four times as many heads."""
        blocks = torch.zeros(4, 4, 2, 4 * kv_heads, head_dim * 16, dtype=torch.bfloat16)
        own = blocks[:, 1:3, :, kv_heads : 2 * kv_heads]
        query = torch.zeros(16, heads, head_dim, dtype=torch.bfloat16)
        qkv = torch.zeros(16, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
        tables, lengths = torch.zeros(16, 64, dtype=torch.int32), torch.ones(17, dtype=torch.int32)
        ids, half = lengths[:16].long(), torch.zeros(16, head_dim // 2)
        last = lengths[:16]
        made.append(("decode of a part of blocks", lambda: paged_decode(query, own, 1, tables, last)))
        made.append(
            (
                "prefill of a part of blocks",
                lambda: paged_prefill(query, own, 1, tables, last, lengths, max_tokens=9),
            )
        )
        made.append(
            (
                "rotary into a part of blocks",
                lambda: rotary_write(qkv, half, half, own, 1, ids, last, heads=heads, kv_heads=kv_heads),
            )
        )

    bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
    part_of_blocks(8, 2, 128)
    attention(32, 8, 128, 16, bf16, bf16)
    attention(32, 8, 128, 16, bf16, fp8)
    attention(16, 2, 256, 16, bf16, fp8)
    if not quick:
        attention(9, 3, 64, 16, bf16, bf16)
        attention(9, 3, 64, 16, fp32, fp32)
        attention(32, 8, 128, 32, fp16, fp16)
        attention(32, 8, 128, 64, bf16, bf16)
        attention(12, 12, 80, 16, bf16, bf16)
        attention(32, 8, 96, 16, bf16, bf16)
        attention(16, 2, 256, 16, bf16, bf16)
    x = torch.zeros(3, 4096, dtype=bf16)
    made.append(("rms_norm", lambda: rms_norm(x, x[0], 1e-5)))
    made.append(("add_rms_norm", lambda: add_rms_norm(x, x.clone(), x[0], 1e-5)))
    parts = torch.zeros(4, 3, 4096, dtype=bf16)
    made.append(("sum of parts", lambda: sum_parts(parts)))
    made.append(("sum of parts and norm", lambda: sum_parts_rms_norm(parts, x.clone(), x[0], 1e-5)))
    made.append(
        ("rms_norm of rows apart", lambda: rms_norm(x[:, :96], x[0, :96].float(), 1e-5, out=x[:, :96]))
    )
    for activation in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
        made.append(
            (
                f"swiglu {activation}",
                lambda activation=activation: swiglu(x, activation=activation, limit=7.0),
            )
        )

    def experts(tokens: int, count: int, chosen: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        name = f"{tokens} rows, {chosen} of {count} {dtype}"
        rows, router = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(count, hidden)
        routed = RoutedRows.make(tokens, count, chosen, rows.device)
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype)
        down, bias = (
            torch.empty(count, hidden, inner, dtype=dtype),
            torch.empty(count, 2 * inner, dtype=dtype),
        )
        parts = torch.empty(tokens * chosen, inner, dtype=dtype)
        made.append((f"route {name}", lambda: route_experts(rows, router, count=chosen, out=routed)))
        made.append(
            (
                f"route in groups {name}",
                lambda: route_experts(
                    rows, router, router[:, 0], router[:, 0], count=chosen, routing="sigmoid", normalise=True,
                    groups=4, groups_per_token=2, group_score="best_two", out=routed,
                ),
            )
        )  # fmt: skip
        made.append((f"experts' gates {name}", lambda: expert_swiglu(rows, gate_up, None, routed)))
        made.append(
            (
                f"experts' clamped gates {name}",
                lambda: expert_swiglu(rows, gate_up, bias, routed, activation="clamped_swiglu", limit=7.0),
            )
        )
        made.append((f"experts' downs {name}", lambda: expert_linear(parts, down, None, routed)))
        made.append((f"experts' sum {name}", lambda: sum_experts(rows.repeat(chosen, 1), routed, rows)))
        held = routed.among(range(count // 2, count))
        made.append((f"sum of some experts {name}", lambda: sum_experts(rows.repeat(chosen, 1), held, rows)))

    experts(4, 128, 8, 2048, 768, bf16)
    experts(200, 128, 8, 2048, 768, bf16)
    if not quick:
        experts(4, 12, 2, 100, 36, fp32)
        experts(70, 32, 4, 2880, 2880, fp16)

    def products(outputs: int, inputs: int, dtype: torch.dtype, biased: bool = False) -> None:
        name = f"{outputs} x {inputs} {dtype}"
        rows, weight = torch.empty(3, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype)
        bias, logits = weight[:, 0].contiguous() if biased else None, torch.empty(3, outputs)
        made.append((f"product {name}", lambda: skinny_linear(rows, weight, bias)))
        made.append((f"product in float32 {name}", lambda: skinny_linear(rows, weight, bias, out=logits)))
        made.append((f"gated product {name}", lambda: skinny_swiglu(rows, weight, bias)))

    def adapted(outputs: int, inputs: int, ranks: int, dtype: torch.dtype) -> None:
        rows, out = torch.empty(3, inputs, dtype=dtype), torch.empty(3, 2 * outputs, dtype=dtype)
        wide, narrow = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int32)
        table = ChangeTable(wide, wide, narrow, torch.zeros(2, 8), narrow[:, 0], narrow[:, 0], outputs)
        scratch, slots = torch.empty(6 * ranks), torch.zeros(3, dtype=torch.int32)
        name = f"adapters of rank {ranks}, {outputs} x {inputs} {dtype}"
        made.append((name, lambda: adapted_linear(rows, out, slots, table, scratch, ranks)))

    adapted(4096, 4096, 64, bf16)
    if not quick:
        adapted(150, 1000, 4, fp32)
        adapted(14336, 4096, 512, fp16)
    products(6144, 4096, bf16)
    products(28672, 4096, bf16)
    if not quick:
        products(4096, 14336, fp16)
        products(18432, 1000, bf16, biased=True)

    def quantised(rows: int, dtype: torch.dtype) -> None:
        x, out = torch.zeros(rows, 4096, dtype=dtype), torch.empty(rows, 6144, dtype=dtype)
        codes = torch.zeros(6144, 4096, dtype=torch.uint8)
        codes[0, 0] = 1
        groups = torch.ones(6144, 32).half()
        of = torch.arange(4096).flip(0) // 128
        for name, matrix in (
            ("int4", pack("int4", codes, groups, 128, zero=8)),
            ("int4 reordered", pack("int4", codes, groups, 128, zeros=codes[:, :32], group_of=of)),
            ("table", pack("table4", codes, torch.ones(6144, 64), 64, table=torch.zeros(16))),
            ("q4_k", from_blocks(BlockMatrix("q4_k", 4096, codes[:, : 16 * 144].contiguous()))),
            ("q6_k", from_blocks(BlockMatrix("q6_k", 4096, codes[:, : 16 * 210].contiguous()))),
            ("fp8", pack("fp8", codes, torch.ones(6144, 1), 4096)),
        ):
            assert matrix is not None
            made.append((f"packed {name} {rows} {dtype}", lambda m=matrix: packed_linear(x, m, out=out)))
            made.append((f"unpack {name}", lambda m=matrix: unpack(m, torch.empty(m.shape, dtype=dtype))))
        squares = ScaledMatrix(codes.view(fp8), torch.ones(48, 32), squares=True)
        whole, floats = (ScaledMatrix(codes.view(kind), torch.ones(6144, 1)) for kind in (torch.int8, fp8))
        for name, matrix in (("fp8", floats), ("fp8 in squares", squares), ("int8", whole)):
            kind, wide = matrix.values.dtype, matrix.squares
            q, scales = torch.zeros(rows, 4096, dtype=kind), torch.zeros(rows, 32 if wide else 1)
            made.append((f"round to {name}", lambda k=kind, w=wide: round_rows(x, k, squares=w)))
            made.append(
                (
                    f"norm and round to {name}",
                    lambda k=kind, w=wide: norm_round(x, x[0], 1e-5, k, residual=x.clone(), squares=w),
                )
            )
            gates = torch.zeros(rows, 28_672, dtype=dtype)
            made.append(
                (
                    f"swiglu and round to {name}",
                    lambda k=kind, w=wide, g=gates: swiglu_round(g, k, squares=w),
                )
            )
            if rows <= 16 and kind == fp8:
                made.append(
                    (
                        f"scaled {name} as they are {rows} {dtype}",
                        lambda m=matrix: scaled_linear(x, None, m, out=out),
                    )
                )
            made.append(
                (
                    f"scaled {name} {rows} {dtype}",
                    lambda m=matrix, q=q, s=scales: scaled_linear(q, s, m, out=out),
                )
            )

    def packed_experts(tokens: int, dtype: torch.dtype) -> None:
        count, chosen, hidden, inner = 4, 2, 2880, 320
        routed = RoutedRows.make(tokens, count, chosen, torch.device("cpu"))
        x, parts = (torch.zeros(n, hidden, dtype=dtype) for n in (tokens, tokens * chosen))
        blocks = torch.zeros(2 * inner, hidden // 32 * 17, dtype=torch.uint8)
        codes = torch.zeros(inner, hidden, dtype=torch.uint8)
        codes[0, 0] = 1
        four = pack("int4", codes, torch.ones(inner, hidden // 32).half(), 32, zero=8)
        both, floats = (
            from_blocks(BlockMatrix("mxfp4", hidden, blocks)),
            pack("fp8", codes, torch.ones(inner, 1), hidden),
        )
        for name, gates, downs in (("mxfp4", both, None), ("int4", None, four), ("fp8", None, floats)):
            if gates is not None:
                stacked = stack([[gates]] * count)
                made.append(
                    (
                        f"packed experts' gates {name} {tokens} {dtype}",
                        lambda s=stacked: packed_expert_swiglu(x, s, None, routed),
                    )
                )
            if downs is not None:
                other = stack([[downs]] * count)
                made.append(
                    (
                        f"packed experts' downs {name} {tokens} {dtype}",
                        lambda s=other: packed_expert_linear(parts, s, None, routed),
                    )
                )

    packed_experts(3, bf16)
    packed_experts(100, bf16)
    quantised(3, bf16)
    quantised(100, bf16)
    if not quick:
        quantised(3, fp16)
    logits, ones, ids = torch.zeros(2, 128_256), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    made.append(("sample", lambda: sample(logits, ones, ids.int(), ones.double(), ones, ids, ids)))
    small, large = (torch.zeros(4, 2, 2, 8, 128 * size, dtype=bf16) for size in (16, 64))
    made.append(("copy", lambda: copy_blocks(small, ids, small, ids)))
    made.append(("copy, digest", lambda: copy_blocks(small, ids, small, ids, digests=ids, binding=ids)))
    narrow, wide = block_major(small, 128), block_major(large, 128)
    other = token_major(torch.zeros(2, 2, 2, 16, 8, 128, dtype=bf16))
    half, four = HeadRange(4, 0, 4), ids.repeat(2)
    for name, source, target, tokens in (
        ("sizes, whole tiles", narrow, wide, 64),
        ("sizes", narrow, wide, 20),
        ("layouts", other, narrow, 20),
    ):
        made.append(
            (
                f"convert {name}",
                lambda source=source, target=target, tokens=tokens: convert_blocks(
                    source, four, target, four, half, tokens, digests=four, binding=four
                ),
            )
        )
    made.extend(recurrent_cases())
    return made


def recurrent(quick: bool) -> list[tuple[str, Callable[[], object]]]:
    """Launches of recurrent layers, by name."""
    from tests.kernels.gpu.recurrent_launches import launches

    return list(launches(quick))


def main() -> int:
    compile_instead_of_launching()
    failed = 0
    quick = "quick" in sys.argv
    for name, launch in [*([] if "recurrent" in sys.argv else cases(quick)), *recurrent(quick)]:
        print(f"-- {name}", flush=True)
        try:
            launch()
        except Exception as error:
            failed += 1
            print(f"FAILED {type(error).__name__}: {str(error)[:2000]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
