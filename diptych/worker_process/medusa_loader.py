"""Loading of the Medusa heads that --speculative-model names, and the checks that they fit the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.heads.head_files import BadHeads
from diptych.engine.heads.medusa import HEADS_FIELD, WEIGHTS, MedusaHeads, is_medusa, read_medusa
from diptych.engine.models.shape import ModelShape
from diptych.engine.runner import Runner
from diptych.runtime.settings import StartupError

_log = logging.getLogger(__name__)


class UnfitHeads(StartupError):
    """Heads that are broken, of another model, or not computed by this worker's backend."""


def is_heads(path: Path) -> bool:
    """Return whether a folder holds Medusa heads. Raises UnfitHeads for heads of another kind."""
    if is_medusa(path):
        return True
    if (kind := named_heads(path)) is not None:
        raise UnfitHeads(f"--speculative-model {path}: {kind}")
    return False


def check_medusa(path: Path, shape: ModelShape) -> str:
    """Return in words what heads of a model of `shape` take. Raises UnfitHeads where they are not its."""
    heads = _read(path, shape.hidden_size, shape.vocab_size, "bf16")
    return f"{len(heads)} Medusa heads, {heads.nbytes / 1e9:.1f} GB in bf16"


def load_medusa(path: Path, runner: Runner, precision: Precision) -> MedusaHeads:
    """Read the heads of `runner`'s model, whose steps give hidden rows from now on. Raises UnfitHeads."""
    flag = f"--speculative-model {path}"
    if (why := runner.give_hidden_rows()) is not None:
        raise UnfitHeads(f"{flag}: Medusa heads are not computed here, {why}")
    shape = runner.model.shape
    heads = _read(path, shape.hidden_size, shape.vocab_size, precision)
    _log.info("loaded %d Medusa heads, %.0f MiB", len(heads), heads.nbytes / 2**20)
    return heads


def _read(path: Path, hidden_size: int, vocab_size: int, precision: Precision) -> MedusaHeads:
    try:
        return read_medusa(path, hidden_size, vocab_size, stored_dtype(precision))
    except BadHeads as error:
        raise UnfitHeads(f"--speculative-model {path}: {error}") from error


def named_heads(path: Path) -> str | None:
    """Return what heads of another kind a folder holds and that they are not computed; None: it is none.

    Known by the names that the authors' files, vLLM and the speculators library give them.
    """
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    words = [config.get("model_type"), config.get("speculators_model_type"), config.get("architectures")]
    named = json.dumps(words).lower()
    if "eagle" in named or "eagle_config" in config:
        return "EAGLE heads are computed in the forms of their authors alone, not in that of speculators"
    if "medusa" in named:
        return f"Medusa heads in another form than {WEIGHTS}, whose config.json has {HEADS_FIELD}"
    if "mlp_speculator" in named or "mtp" in named or "nextn" in named:
        return "layers for multi-token prediction are read from the model's own folder: say mtp"
    return None
