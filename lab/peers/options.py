"""The flags of `python -m lab.peers`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.bench import values
from diptych.engine.dtype import ON_CPU
from lab.peers.measure import Sizes
from lab.peers.places import DEFAULT_ROOT, Places
from lab.peers.servers import CONTEXT
from lab.peers.shapes import Shape

GGUF_KINDS = ("Q4_0", "Q4_1", "Q8_0", "BF16")
VLLM_KINDS = ("bf16", "w8a8")
_QUICK_GGUF = ("Q4_0", "BF16")
_QUICK = Sizes(per_client=2, fewest=4, prefills=8, alone_s=1.5, beside_s=4.0)
_RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True)
class Options:
    """Options of the comparison: servers, loads and rounds."""

    places: Places
    results: Path
    label: str
    ours: tuple[str, ...]
    llama: tuple[str, ...]
    vllm: tuple[str, ...]
    concurrencies: tuple[int, ...]
    shapes: tuple[Shape, ...]
    rounds: int
    sizes: Sizes
    model: str
    install_only: bool
    fresh: bool


def parse(argv: Sequence[str]) -> Options:
    """Exits with status 2 and a line about it for wrong flags."""
    given = _parser().parse_args(argv)
    sizes = _QUICK if given.quick else Sizes()
    return Options(
        places=Places(given.cache.expanduser().absolute()),
        results=given.results.absolute(),
        label=given.label,
        ours=given.dtypes,
        llama=_llama(given.llama, quick=given.quick),
        vllm=given.vllm,
        concurrencies=given.concurrency,
        shapes=given.shapes,
        rounds=given.rounds if given.rounds is not None else 1 if given.quick else 3,
        sizes=sizes,
        model=given.model,
        install_only=given.install_only,
        fresh=given.fresh,
    )


def _llama(given: tuple[str, ...] | None, *, quick: bool) -> tuple[str, ...]:
    if given is not None:
        return given
    return _QUICK_GGUF if quick else GGUF_KINDS


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m lab.peers",
        allow_abbrev=False,
        description="Diptych beside llama.cpp and vLLM on the same cores: installs, measures, compares.",
        epilog="Interrupted, the same command goes on where it stopped. 'none' leaves a peer out.",
    )
    add = made.add_argument
    add("--quick", action="store_true", help="one round, fewer requests, fewer GGUF types: under 8 minutes")
    add("--rounds", type=values.count, metavar="N", help="interleaved rounds (3)")
    add("--concurrency", type=_numbers, default=(1, 8, 16), metavar="N,…", help="clients (1,8,16)")
    add(
        "--shapes",
        type=_shapes,
        default=(),
        metavar="IN+OUT@C,…",
        help="more closed loops, of other lengths: 512+128@16 (none)",
    )
    add(
        "--dtypes",
        type=_names(("auto", *ON_CPU)),
        default=("bf16", "int8", "gguf"),
        metavar="D,…",
        help="ours (bf16,int8,gguf)",
    )
    add("--llama", type=_names(GGUF_KINDS), metavar="T,…", help=f"GGUF types ({','.join(GGUF_KINDS)})")
    add("--vllm", type=_names(VLLM_KINDS), default=VLLM_KINDS, metavar="T,…", help="bf16,w8a8")
    add("--model", default="bundled", help="a GGUF file (bundled)")
    add("--cache", type=Path, default=DEFAULT_ROOT, help="where the peers are installed (%(default)s)")
    add("--results", type=Path, default=_RESULTS, help="where the table goes (%(default)s)")
    add("--label", default="peers-cpu", help="in the results' file names (%(default)s)")
    add("--install-only", action="store_true", help="install and make the models, measure nothing")
    add("--fresh", action="store_true", help="forget an interrupted run")
    return made


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(values.list_of(values.count)(text))))


def _shapes(text: str) -> tuple[Shape, ...]:
    try:
        shapes = tuple(map(Shape.parse, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for shape in shapes:
        if shape.input_len + shape.output_len > CONTEXT:
            raise argparse.ArgumentTypeError(f"{shape.load}: vLLM is started for {CONTEXT} tokens")
    return tuple(dict.fromkeys(shapes))


def _names(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = () if text == "none" else tuple(text.split(","))
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return names

    return parse
