"""`python -m lab.gpu.tune`: find the tile sizes of attention and of products on this GPU, and keep them.

Candidates are compiled by as many processes as there are cores (one takes a second or more, and there are
dozens), then measured one by one where the targets are: decode at batch 32 and 16K, prefill at 16K. What is
found is written to the file that kernels/gpu/tuning.py names, for the shapes of an 8B model in bfloat16;
with `--package` to the table of the package, for its card. Products are those of tune_products.py.
`--dry-run` with TRITON_INTERPRET=1 does every line once on a CPU, at tiny sizes, into a file that is thrown
away.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels.gpu.card_tiles import H200, Card, card_of
from kernels.gpu.package_tiles import FILE, write_measured
from kernels.gpu.tuning import (
    Config,
    decode_candidates,
    device_name,
    keep,
    prefill_candidates,
    shape_class,
    tuning_file,
)
from lab.gpu.paged_case import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, paged_case, random_query
from lab.gpu.section import Context, Unmeasured, device_of
from lab.gpu.timing import Work, measure
from lab.gpu.tune_products import run_once, tune_products

_TOKENS = 16_384
_DRY_TOKENS = 32
_COMPILED_TOKENS = 4096
"""Size whose dependent numbers are multiples of 16, as with the larger one: Triton compiles by that."""


Keep = Callable[[str, str, Config], None]
"""Keeps the tile of an operator for a class of shapes."""


def tune_attention(context: Context, device: torch.device, kept: Keep) -> None:
    """Measure all candidates of both kernels of attention, and keep the fastest of each."""
    shapes = shape_class(HEAD_DIM, HEADS // KV_HEADS, BLOCK_SIZE, torch.bfloat16, torch.bfloat16)
    candidates = {
        name: list(found(HEAD_DIM))[: context.pick(None, None, 1)] for name, (found, _) in _OPERATORS.items()
    }
    jobs = [(str(device), name, config) for name, configs in candidates.items() for config in configs]
    _compile(context, _run_once, jobs)
    for operator, (_, make) in _OPERATORS.items():
        work = make(device, context.pick(_TOKENS, _TOKENS, _DRY_TOKENS))
        best = _fastest(context, operator, candidates[operator], work)
        if operator == "paged_prefill":
            best = {**best, "by_table": _tiles_by_table(context, device, best)}
        kept(operator, shapes, best)
        context.say(f"{operator}: {best}")


def _tiles_by_table(context: Context, device: torch.device, tile: Config) -> int:
    """Return the most tiles of rows to read through the block table: 0, or those of one of two chunks."""
    from kernels.gpu.paged_prefill import paged_prefill

    most = 0
    for tokens in context.pick((128, 512), (128, 512), (16,)):
        case, query = (
            paged_case(1, context.pick(2048, 2048, _DRY_TOKENS), device),
            random_query(tokens, device),
        )
        starts = torch.tensor([case.tables.shape[1] * BLOCK_SIZE - tokens], dtype=torch.int32, device=device)
        offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        work = partial(paged_prefill, query, case.blocks, 0, case.tables, starts, offsets, max_tokens=tokens)
        tiles = -(-tokens * (HEADS // KV_HEADS) // tile["rows"])
        seconds = {}
        for by_table in (0, tiles):
            with mock.patch("kernels.gpu.paged_prefill.look_up", _always({**tile, "by_table": by_table})):
                seconds[by_table] = measure(context, {"prefill": work}, rounds=10)["prefill"].median_s
        context.say(f"{tokens} tokens through the table: {seconds[tiles] / seconds[0]:.2f} of gathered")
        if seconds[tiles] <= seconds[0]:
            most = tiles
    return most


def _compile(context: Context, run: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Run every job once, in processes of their own: what they compile stays in Triton's cache."""
    if context.dry:
        return
    workers = min(len(jobs), os.cpu_count() or 1)
    context.say(f"compiling {len(jobs)} candidates in {workers} processes")
    # A CUDA context does not survive a fork.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(run, *zip(*jobs, strict=True)):
            pass


def _run_product(device: str, number: int, product: str, tile: Config) -> None:
    with contextlib.suppress(Exception):
        run_once(torch.device(device), number, product, tile)


def _run_once(device: str, operator: str, config: Config) -> None:
    """Launch once, over as many tokens as make the same kernel; failures are reported when measured."""
    _, make = _OPERATORS[operator]
    work = make(torch.device(device), _COMPILED_TOKENS)
    with mock.patch(f"kernels.gpu.{operator}.look_up", _always(config)), contextlib.suppress(Exception):
        work()


def _fastest(context: Context, operator: str, candidates: Sequence[Config], work: Work) -> Config:
    found: list[tuple[float, Config]] = []
    for config in candidates:
        with mock.patch(f"kernels.gpu.{operator}.look_up", _always(config)):
            try:
                time = measure(context, {operator: work}, rounds=10)[operator]
            except Exception as error:
                # Too much shared memory, or nothing that this Triton compiles: not a candidate here.
                context.say(f"{operator} {config}: {type(error).__name__}")
                continue
        found.append((time.median_s, config))
        context.say(f"{operator} {config}: {time.median_s * 1e6:.1f} µs")
    if not found:
        raise Unmeasured(f"no configuration of {operator} runs")
    return min(found, key=lambda one: one[0])[1]


def _always(config: Config) -> Callable[..., Config]:
    return lambda *_: config


def _decode(device: torch.device, tokens: int) -> Work:
    from kernels.gpu.decode_splits import make_scratch
    from kernels.gpu.paged_decode import paged_decode

    rows = 32 if tokens > _DRY_TOKENS else 2
    case, query = paged_case(rows, tokens, device), random_query(rows, device)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    scratch, out = make_scratch(rows, HEADS, HEAD_DIM, tokens, device), torch.empty_like(query)
    return lambda: paged_decode(query, case.blocks, 0, case.tables, lengths, scratch=scratch, out=out)


def _prefill(device: torch.device, tokens: int) -> Work:
    from kernels.gpu.paged_prefill import paged_prefill

    case, query = paged_case(1, tokens, device), random_query(tokens, device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    return lambda: paged_prefill(
        query, case.blocks, 0, case.tables, starts, offsets, max_tokens=tokens, out=out
    )


_OPERATORS = {"paged_decode": (decode_candidates, _decode), "paged_prefill": (prefill_candidates, _prefill)}
"""Candidates by name: what is tried, and the work to measure on a device over so many tokens."""


def _card(device: torch.device) -> Card:
    """Return the card of a device; the CPU's interpreter stands for an H200. Raises Unmeasured for others."""
    found = H200 if device.type != "cuda" else card_of(device_name(device))
    if found is None:
        raise Unmeasured(f"{device_name(device)} is no card of kernels/gpu/card_tiles.py")
    return found


def _kept(device: torch.device, package: Path | None) -> Keep:
    """Return what keeps a tile: in the tuner's file, or in the table `package`."""
    if package is None:
        return partial(keep, device)
    return partial(write_measured, _card(device).name, path=package)


def tune(context: Context, package: Path | None, only: Sequence[str]) -> None:
    """Tune `only` these of attention and products. Raises Unmeasured without a GPU or for an unknown one."""
    device = device_of(context)
    kept = _kept(device, package)
    if "attention" in only:
        tune_attention(context, device, kept)
    if "products" in only:

        def prepare(jobs: list[tuple[int, str, Config]]) -> None:
            _compile(context, _run_product, [(str(device), *job) for job in jobs])

        tune_products(context, device, _card(device), kept, prepare)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lab.gpu.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=("attention", "products"))
    parser.add_argument("--package", action="store_true", help="keep tiles in the package's table")
    parser.add_argument("--dry-run", action="store_true", help="every line once on a CPU")
    asked = parser.parse_args(arguments)
    device = torch.device("cpu" if asked.dry_run else "cuda")
    context = Context(device, quick=False, say=lambda line: print(line, flush=True), dry=asked.dry_run)
    package = FILE if asked.package else None
    with tempfile.TemporaryDirectory() as folder:
        if asked.dry_run:
            package = Path(shutil.copy(FILE, folder))
        try:
            tune(context, package, asked.only or ("attention", "products"))
        except Unmeasured as missing:
            print(missing, file=sys.stderr)
            return 1
        print(f"kept in {package or tuning_file()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
