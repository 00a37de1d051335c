"""`python -m lab.quality`: from flags to a table and a file."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from diptych.bench import result_file
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import UnsupportedModel
from diptych.runtime.settings import resolve_model
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from lab.precisions import PRECISIONS, load_kept, load_precision
from lab.quality.divergence import judge
from lab.quality.measure import REFERENCE, measure
from lab.quality.report import as_object, markdown, passes
from lab.quality.text import Text, TooShort, python_reference, text_file, windows


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 1 when a precision misses the bar, 2 for wrong flags or a text that is too short."""
    parser = _parser()
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        path = resolve_model(options.model)
        text = python_reference() if options.text is None else text_file(options.text)
        token_ids = Tokenizer.load(path).encode(text.content)
        pieces = windows(token_ids, options.windows, options.window)
    except (OSError, ValueError, TooShort) as error:
        parser.error(str(error))
    console.print(f"{text.source}: {len(token_ids):,} tokens, sha256 {text.sha256}", highlight=False)
    models = _load(path, options.dtype, console)
    models |= {f"fp32, KV in {kept}": load_kept(path, kept) for kept in options.kv_cache_dtype}
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("windows", total=len(pieces))
        sums = measure(models, pieces, options.threads, lambda: progress.advance(task))
    found = {name: judge(one) for name, one in sums.items()}
    about = _about(path, text, models[REFERENCE], options)
    print(markdown(found, about))
    if options.output_file is not None:
        result_file.write(options.output_file, [as_object(found, about)])
    return 0 if all(map(passes, found.values())) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m lab.quality", description=__doc__)
    parser.add_argument("--model", default="bundled", help="GGUF file or Hugging Face folder")
    parser.add_argument(
        "--dtype",
        type=lambda text: text.split(","),
        default=list(PRECISIONS),
        help=f"precisions beside fp32, by commas (default: {','.join(PRECISIONS)})",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="*",
        choices=["int8", "fp8"],
        default=[],
        help="types of keys and values beside fp32's own",
    )
    parser.add_argument("--text", type=Path, help="a UTF-8 file instead of the Python reference")
    parser.add_argument("--windows", type=int, default=40, help="pieces of text (default: 40)")
    parser.add_argument("--window", type=int, default=512, help="tokens of each (default: 512)")
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--output-file", type=Path, help="figures as JSON")
    return parser


def _load(path: Path, names: Sequence[str], console: Console) -> dict[str, Model]:
    """fp32 first, whether or not it was asked for; a precision that this model has not is left out."""
    models: dict[str, Model] = {}
    for name in (REFERENCE, *(one for one in names if one != REFERENCE)):
        known = next((one for one in PRECISIONS if one == name), None)
        if known is None:
            raise SystemExit(f"lab.quality: no precision {name}; there are {', '.join(PRECISIONS)}")
        try:
            models[name] = load_precision(path, known)
        except UnsupportedModel as error:
            console.print(f"{name}: {error}", style="yellow", markup=False)
    return models


def _about(path: Path, text: Text, reference: Model, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "model": path.name,
        "backend": reference.backend_name,
        "source": text.source,
        "licence": text.licence,
        "sha256": text.sha256,
        "windows": options.windows,
        "window": options.window,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {name: version(name) for name in ("diptych", "torch", "numpy")},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
