"""Tile sizes of a kernel: found once by measuring, kept in a JSON file, looked up by device.

A class of shapes never contains the number of rows or their lengths: tiles set the order of a sum, and a
row's result must not depend on its neighbours. lab/gpu runs the tuner; without its file the package's tiles
hold (package_tiles.py), and without those the written defaults, which are meant for an H200. H100, A100, L40S
and RTX 4090 have fewer programs of decode attention (card_tiles.py), and tiles of prefill that fit the memory
of a program: by arithmetic, measured on none of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kernels.gpu.card_tiles import decode_programs
from kernels.gpu.launch import power_of_two
from kernels.gpu.package_tiles import package_tile

Config = dict[str, int]

FILE_VARIABLE = "DIPTYCH_GPU_TUNING"
"""Names another file."""

_SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on Hopper."""
_SPARE = 16
"""Share of it, one part of so many, that is left for what changes its layout on the way."""
_LEAST_SIDE = 16


def tuning_file() -> Path:
    """Return the file of found configurations: in the user's cache folder, or what the environment names."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "diptych" / "gpu_tuning.json"


def shape_class(head_dim: int, group: int, block_size: int, query: torch.dtype, kept: torch.dtype) -> str:
    """Return the name under which attention over such heads is tuned; `group` is query heads a KV head."""
    return f"D{head_dim} G{group} B{block_size} {_short(query)}/{_short(kept)}"


def device_name(device: torch.device) -> str:
    """Return the name of a device in the file."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@lru_cache(maxsize=1024)
def look_up(device: torch.device, operator: str, shapes: str, default: tuple[tuple[str, int], ...]) -> Config:
    """Return what was found for `operator` on this device; where nothing was, what the package has for this
    card, else `default` (name, value), which is an H200's, as card_tiles.py has it for this card.
    """
    card = device_name(device)
    found = _read(tuning_file()).get(card, {}).get(operator, {}).get(shapes, {})
    kept = {name: decode_programs(card, value) if name == "programs" else value for name, value in default}
    package = package_tile(card, operator, shapes)
    return {name: int(found.get(name, package.get(name, value))) for name, value in kept.items()}


def keep(device: torch.device, operator: str, shapes: str, config: Mapping[str, int]) -> None:
    """Write one found configuration into the file; the rest of it stays. Raises OSError."""
    path = tuning_file()
    everything = _read(path)
    everything.setdefault(device_name(device), {}).setdefault(operator, {})[shapes] = dict(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(everything, indent=2, sort_keys=True) + "\n")
    # Whole or not at all: workers may be starting.
    fresh.replace(path)
    look_up.cache_clear()


def decode_default(head_dim: int, itemsize: int, block_size: int) -> tuple[tuple[str, int], ...]:
    """Return the default tiles of paged decode, `itemsize` bytes a number in the cache.

    Found on an H200 with heads of 128 and blocks of 16, in 16 and 8 bits: many programs of few threads, each
    with little on its way, move more than few with deep pipelines. FP8 in three stages does not compile:
    a key of one byte is too small for their copies. `fold` is 1 where the last split of a row joins them, 0
    where a launch of its own does (decode_splits.py has the arithmetic; no card has measured it).
    """
    fold = ("fold", 1)
    if itemsize == 4:
        tile = ("tile", 16 if head_dim > 128 else 32)
        return (tile, ("num_warps", 4), ("num_stages", 3), ("programs", 2), fold)
    if head_dim > 128 or block_size > 32:
        return (("tile", 32), ("num_warps", 4), ("num_stages", 2), ("programs", 4), fold)
    programs = ("programs", 12 if itemsize == 1 else 16)
    return (("tile", 32), ("num_warps", 1), ("num_stages", 2), programs, fold)


def prefill_default(
    head_dim: int, itemsize: int, memory: int = _SHARED_MEMORY
) -> tuple[tuple[str, int], ...]:
    """Return the default tiles of paged prefill, `itemsize` bytes a number of the query, on a card that gives
    a program `memory` bytes.

    Found on an H200 for bfloat16 and heads of 128. Where they do not fit, tiles of keys are halved first,
    then those of queries: fewer keys on their way cost less than keys that are read twice as often.
    """
    rows, tile, stages = (32, 32, 1) if itemsize == 4 else (128, 64, 2)
    while prefill_bytes(head_dim, itemsize, rows, tile, stages) > memory - memory // _SPARE:
        if tile > _LEAST_SIDE * 2:
            tile //= 2
        elif rows > _LEAST_SIDE:
            rows //= 2
        else:
            break
    num_warps = 8 if itemsize < 4 and head_dim > 128 and rows >= 128 else 4
    return (("rows", rows), ("tile", tile), ("num_warps", num_warps), ("num_stages", stages))


def prefill_bytes(head_dim: int, itemsize: int, rows: int, tile: int, stages: int) -> int:
    """Return the bytes of queries, and of keys and values on their way, that a program of prefill holds.

    Heads are padded to a power of two.
    """
    return (rows + 2 * tile * stages) * power_of_two(head_dim, 16) * itemsize


@lru_cache(maxsize=16)
def program_memory(device: torch.device) -> int:
    """Return the bytes that a program may have on a device; on the CPU, and where torch does not say, on
    Hopper.
    """
    if device.type != "cuda":
        return _SHARED_MEMORY
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return _SHARED_MEMORY if found is None else int(found)


def decode_candidates(head_dim: int) -> Iterable[Config]:
    """Yield the configurations that the tuner tries for paged decode."""
    for tile in (32, 64, 128):
        for num_warps in (1, 2, 4):
            for num_stages in (2, 3, 5):
                if 2 * tile * head_dim * 2 * num_stages <= _SHARED_MEMORY // 2:
                    for programs in (4, 8, 12, 16):
                        # Without the fold where it may be better, at the tiles that were best so far.
                        for fold in (1, 0) if (tile, num_warps, num_stages) == (32, 1, 2) else (1,):
                            yield _config(
                                tile=tile, num_warps=num_warps, num_stages=num_stages, programs=programs,
                                fold=fold,
                            )  # fmt: skip


def prefill_candidates(head_dim: int) -> Iterable[Config]:
    """Yield the configurations that the tuner tries for paged prefill in 16 bits."""
    for rows, num_warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        for tile in (32, 64, 128):
            for num_stages in (2, 3, 4):
                if prefill_bytes(head_dim, 2, rows, tile, num_stages) <= _SHARED_MEMORY:
                    yield _config(rows=rows, tile=tile, num_warps=num_warps, num_stages=num_stages)


def _config(**values: int) -> Config:
    return values


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
