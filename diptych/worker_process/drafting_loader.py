"""Loading of what drafts tokens for a model: a draft model, Medusa heads or EAGLE heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.dtype import Precision
from diptych.engine.heads.medusa import MedusaHeads
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.runner import Runner
from diptych.engine.shared_cores import SharedCores
from diptych.engine.weights.checkpoint import shape_of
from diptych.runtime.cpu_time_slice import take_long_turns, take_short_turns
from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_files import checked_model
from diptych.runtime.settings import resolve_model
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.draft_loader import LoadedDraft, check_keeps_no_state, check_vocabulary
from diptych.worker_process.eagle_loader import EagleFiles, LoadedEagle, eagle_files, load_eagle
from diptych.worker_process.medusa_loader import is_heads, load_medusa
from diptych.worker_process.precision import chosen_precision
from diptych.worker_process.recurrent_model import check_heads_fit
from diptych.worker_process.self_test import run_self_test
from diptych.worker_process.whole_model import load_whole


@dataclass(frozen=True, slots=True)
class DraftingFiles:
    """Files of what drafts, of which one at most is given."""

    model: Path | None = None
    medusa: Path | None = None
    eagle: EagleFiles | None = None


def drafting_files(settings: WorkerSettings, model: Path) -> DraftingFiles:
    """Return the files that --speculative-model names for `model`. Raises StartupError."""
    if settings.speculative_model is None:
        return DraftingFiles()
    eagle = eagle_files(settings.speculative_model, model)
    found = None if eagle is not None else resolve_model(settings.speculative_model)
    if found is not None and not is_heads(found):
        path = checked_model(settings.speculative_model)
        check_vocabulary(model, path)
        check_keeps_no_state(path)
        return DraftingFiles(model=path)
    check_heads_fit(shape_of(model), settings.speculative_model)
    return DraftingFiles(medusa=found, eagle=eagle)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft model or heads, of which one at most is loaded."""

    draft: LoadedDraft | None = None
    heads: MedusaHeads | None = None
    eagle: LoadedEagle | None = None

    def kv_layout(self, block_size: int) -> KVLayout | None:
        """Return the layout of its own keys and values in a block; None: it has none."""
        if self.draft is not None:
            return self.draft.model.kv_layout(block_size)
        return None if self.eagle is None else self.eagle.head.kv_layout(block_size)


def load_drafting(
    settings: WorkerSettings,
    files: DraftingFiles,
    runner: Runner,
    dtype: Precision,
    device: torch.device,
    shared: SharedCores | None,
) -> Drafting:
    """Load what `files` name, for drafts of the model that `runner` computes."""
    if files.model is not None:
        return Drafting(draft=_draft(settings, files.model, device, shared))
    if files.medusa is not None and settings.decodes:
        return Drafting(heads=load_medusa(files.medusa, runner, dtype))
    if files.eagle is not None:
        return Drafting(eagle=load_eagle(files.eagle, runner, dtype))
    return Drafting()


def _draft(
    settings: WorkerSettings, path: Path, device: torch.device, shared: SharedCores | None
) -> LoadedDraft:
    """Load the draft model, which computes on the same cores, between the model's steps."""
    model = load_whole(settings, path, chosen_precision(settings, path, device), device, None)
    cpu = CpuPolicy(
        model.backend,
        settings.threads,
        shared=shared,
        long_turns=take_long_turns,
        short_turns=take_short_turns,
    )
    runner = Runner(model, cpu=cpu)
    run_self_test(runner, model.kv_layout(settings.block_size))
    return LoadedDraft(model, runner, model_digest(path))
