"""The recurrences of the native step in libraries of their own, and layers of torch's over the same rows."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from diptych.engine.backends.torch.recurrent.causal_conv import causal_conv
from diptych.engine.backends.torch.recurrent.layer import make_layer
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parents[2]
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
SETS = {"plain": (), "avx2": ("-mavx2", "-mfma", "-mf16c"), "avx512": _AVX512}
"""Instruction sets by their header's name, with the compiler's flags."""
NORMS = {"none": 0, "after_gate": 1, "before_gate": 2}
EPS = 1e-5
"""Epsilon of models' norms."""


class _DeltaSizes(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        ("largest_rate", c_float),
        ("epsilon", c_float),
    )


class _Rows(Structure):
    """`DeltaRows` and `SpaceRows`, which differ in the names of three places."""

    _fields_ = (
        ("first", c_void_p),
        ("stride", c_int64),
        ("places", c_int64 * 3),
        ("count", c_int32),
    )


class _SpaceSizes(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("heads", "head_dim", "groups", "numbers", "norm")),
        *((name, c_float) for name in ("least_step", "largest_step", "epsilon")),
    )


class _ScanWeights(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("decay", "step_bias", "skip")),
        ("numbers", c_int32),
        ("channels", c_int64),
    )


class _ScanRows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "gate", "step")),
        ("stride", c_int64),
        ("step_stride", c_int64),
        *((name, c_void_p) for name in ("b", "c")),
        ("read_stride", c_int64),
        ("count", c_int32),
    )


def compile_recurrences(name: str, folder: Path) -> ctypes.CDLL:
    """Return the library of an instruction set, which it makes in `folder`."""
    target = folder / f"{name}.so"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", *SETS[name]]
    header = f'-DDIPTYCH_SIMD="simd_{name}.h"'
    source = str(_FOLDER / "recurrences.cpp")
    subprocess.run(
        ["g++", *flags, header, f"-I{_ROOT / 'kernels/cpu'}", source, "-o", str(target)], check=True
    )
    return ctypes.CDLL(str(target))


def tensors_of(shape: Any, hidden: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return random tensors of a layer: what is left out is to show."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, size in shape.tensors(hidden):
        values = torch.randn(size, generator=generator)
        scale = size[-1] ** -0.5 if len(size) == 2 and name != "decay" else 0.5
        about = {"decay": -1.0, "skip": 1.0}.get(name, 1.0 if name.endswith("norm") else 0.0)
        found[name] = about + scale * values
    return found


@dataclass
class Case:
    """A layer with its weights, and native functions over the same."""

    shape: DeltaShape | SpaceShape | ScanShape
    library: ctypes.CDLL
    seed: int = 3

    def __post_init__(self) -> None:
        self.tensors = tensors_of(self.shape, 8, self.seed)
        self.layer: Any = make_layer(self.shape, self.tensors, functional.linear, EPS)

    @property
    def width(self) -> int:
        """Numbers that the recurrence reads of a token."""
        if isinstance(self.shape, ScanShape):
            return 2 * self.shape.width
        return sum(self.shape.projected)

    def mixed(self, rows: int, seed: int = 1) -> torch.Tensor:
        """Return random rows as the layer's projections make them, `[rows, width]`."""
        return torch.randn(rows, self.width, generator=torch.Generator().manual_seed(seed))

    def states(self, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random states of a sequence."""
        generator = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(size, generator=generator) for size in self.shape.states)
        return first, second

    def expected(
        self, mixed: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return torch's outputs of these rows, and the matrices behind them."""
        out, (_, matrices) = self.layer.advance(mixed[None], tuple(state[None] for state in states))
        return out[0], matrices[0]

    def native(
        self, mixed: torch.Tensor, states: Sequence[torch.Tensor], cuts: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same of the native function, called once for the rows up to each cut and the rest."""
        rows = self._convolved(mixed, states[0])
        matrices, outs = states[1].clone(), []
        for begin, end in zip((0, *cuts), (*cuts, len(mixed)), strict=True):
            # Of the first call the states lie apart, of others in one place.
            to = torch.full_like(matrices, torch.nan) if begin == 0 else matrices
            outs.append(self._advance(rows[begin:end].clone(), matrices, to))
            matrices = to
        return torch.cat(outs), matrices

    def _convolved(self, mixed: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return rows with SiLU of the convolution in place of its inputs."""
        parts = [f"{part}_conv" for part in "qkv"] if getattr(self.shape, "apart", False) else ["conv"]
        taps = torch.cat([self.tensors[part] for part in parts]).squeeze(1)
        begin = self.shape.width if isinstance(self.shape, SpaceShape) else 0
        inner = mixed[None, :, begin : begin + len(taps)]
        found, _ = causal_conv(inner, taps, self.tensors.get("conv_bias"), seen[None])
        rows = mixed.clone()
        rows[:, begin : begin + len(taps)] = functional.silu(found[0])
        return rows

    def _advance(self, rows: torch.Tensor, before: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        advance: Mapping[type, Callable[..., torch.Tensor]] = {
            DeltaShape: _delta,
            SpaceShape: _space,
            ScanShape: _scan,
        }
        return advance[type(self.shape)](self, rows, before, to)


def _addresses(*tensors: torch.Tensor | None) -> Any:
    return (c_void_p * len(tensors))(*(None if one is None else one.data_ptr() for one in tensors))


def _rows(rows: torch.Tensor, *places: int) -> _Rows:
    return _Rows(rows.data_ptr(), rows.stride(0), (c_int64 * 3)(*places), len(rows))


def _run(function: Any, *arguments: Any) -> None:
    function.restype = None
    function(*(c_void_p(one.data_ptr()) if isinstance(one, torch.Tensor) else one for one in arguments))


def _delta(case: Case, rows: torch.Tensor, before: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    shape, tensors = case.shape, case.tensors
    assert isinstance(shape, DeltaShape)
    eps = EPS if shape.norm_eps is None else shape.norm_eps
    sizes = _DeltaSizes(
        shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.largest_rate, eps
    )
    channels, values, heads, _ = shape.projected
    decay = -tensors["decay"].exp()
    out = torch.empty(len(rows), values)
    weights = _addresses(decay, tensors["step_bias"], tensors["norm"])
    places = _rows(rows, channels, channels + values, channels + values + heads)
    _run(case.library.delta, ctypes.byref(sizes), weights, ctypes.byref(places), before, to, out)
    return out


def _space(case: Case, rows: torch.Tensor, before: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    shape, tensors = case.shape, case.tensors
    assert isinstance(shape, SpaceShape)
    numbers = (shape.heads, shape.head_dim, shape.groups, shape.state, NORMS[shape.norm])
    sizes = _SpaceSizes(*numbers, *shape.step_bounds, EPS)
    decay = -tensors["decay"].exp()
    weights = _addresses(decay, tensors["step_bias"], tensors["skip"], tensors.get("norm"))
    width, channels, _ = shape.projected
    out = torch.empty(len(rows), width)
    places = _rows(rows, 0, width, width + channels)
    _run(case.library.space, ctypes.byref(sizes), weights, ctypes.byref(places), before, to, out)
    return out


def _scan(case: Case, rows: torch.Tensor, before: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    shape, tensors = case.shape, case.tensors
    assert isinstance(shape, ScanShape)
    x, gate = rows.split(shape.width, dim=1)
    read = _by_rows(x, tensors["x_proj"]).split([shape.rank, shape.state, shape.state], dim=1)
    step, b, c = (
        functional.rms_norm(part, part.shape[-1:], tensors[f"{name}_norm"], EPS)
        for name, part in zip(("step", "b", "c"), read, strict=True)
    )
    steps = _by_rows(step, tensors["step_proj"])
    b, c = b.contiguous(), c.contiguous()
    decay = -tensors["decay"].T.exp().contiguous()
    weights = _ScanWeights(
        *_addresses(decay, tensors["step_bias"], tensors["skip"]), shape.state, shape.width
    )
    out = torch.empty(len(rows), shape.width)
    read_rows = _ScanRows(
        *_addresses(x, gate, steps),
        rows.stride(0),
        steps.stride(0),
        *_addresses(b, c),
        b.stride(0),
        len(rows),
    )
    _run(case.library.scan_channels, ctypes.byref(weights), ctypes.byref(read_rows), before, to, out)
    return out


def _by_rows(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return products whose bits do not depend on the number of rows."""
    return torch.stack([matrix @ row.clone() for row in x])


def softplus(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    """Return the native softplus of a vector."""
    to = torch.empty_like(x)
    library.softplus_of.argtypes = (c_void_p, c_void_p, c_int32)
    library.softplus_of(x.data_ptr(), to.data_ptr(), len(x))
    return to
