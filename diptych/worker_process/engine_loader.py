"""Loading of a worker's model: weights, CPU policy, runner, digest and self-test."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diptych.engine.card_turns import CardTurns
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.device import choose_device
from diptych.engine.dtype import Precision
from diptych.engine.gpu_memory import GpuMemory
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.kv.window_groups import WindowGroups, window_groups
from diptych.engine.loaded_model import Model
from diptych.engine.parallel.stages import Grid
from diptych.engine.runner import Runner
from diptych.engine.shared_cores import SharedCores
from diptych.engine.step_pacing import StepPacing
from diptych.engine.usable_cores import usable_cores
from diptych.engine.vision.encoder import ImageEncoder
from diptych.engine.vision.registry import load_encoder
from diptych.engine.weights.checkpoint import shape_of
from diptych.runtime.cpu_time_slice import take_long_turns, take_short_turns
from diptych.runtime.model_context import check_max_model_len
from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_files import fetched_model
from diptych.runtime.model_images import ModelImages, model_images
from diptych.runtime.model_name import model_names
from diptych.worker_process.config import ImpossibleSettings, WorkerSettings, why_not_together
from diptych.worker_process.drafting_loader import Drafting, DraftingFiles, drafting_files, load_drafting
from diptych.worker_process.group.load import load_in_parts
from diptych.worker_process.group.other_hosts import other_hosts
from diptych.worker_process.group.rank_group import RankGroup
from diptych.worker_process.lent_cores import shared_backlog, shared_cores
from diptych.worker_process.loaded_engine import LoadedEngine
from diptych.worker_process.precision import chosen_precision
from diptych.worker_process.recurrent_model import check_recurrent_settings, describe_states
from diptych.worker_process.self_test import run_self_test
from diptych.worker_process.whole_model import load_whole
from kvtransfer.transports.registry import transports_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beside:
    """Parts that a worker gets from a process that hosts a worker of the other role, too (diptych/host)."""

    model: Model | None = None
    """Model whose weights this worker computes with; None: it loads them."""
    stream: torch.cuda.Stream | None = None
    """Stream of its steps; None: the default one."""
    turns: CardTurns | None = None
    """Turns that the two workers take on their GPU."""
    paced: bool = True
    """True if decode steps begin less often while prompts queue for the GPU."""


ALONE = Beside()


async def load_engine(settings: WorkerSettings, beside: Beside = ALONE) -> LoadedEngine:
    """Load the model and run its self-test, off the event loop: it takes seconds. Raises SelfTestFailed."""
    group = None
    grid = Grid(settings.tensor_parallel, settings.pipeline_parallel)
    if grid.size > 1:
        name = f"{settings.program}/{settings.worker_id}"
        group = RankGroup(
            grid,
            name,
            settings.log_level,
            other_hosts(settings),
            own_memories=settings.ranks_have_memories(choose_device(settings.device).type),
            share_host=settings.host,
        )
    return await asyncio.to_thread(_load_on_stream, settings, group, beside)


def _load_on_stream(settings: WorkerSettings, group: RankGroup | None, beside: Beside) -> LoadedEngine:
    with torch.cuda.stream(beside.stream):
        return _load(settings, group, beside)


def _load(settings: WorkerSettings, group: RankGroup | None, beside: Beside) -> LoadedEngine:
    take_long_turns()  # inherited by the threads that the first step starts, which compute later ones too
    started = time.monotonic()
    device = choose_device(settings.device)
    files = _checked_files(settings, device)
    memory = GpuMemory.of(device)
    dtype = chosen_precision(settings, files.path, device)
    # Weights are converted in torch: more threads than this worker has cores wait for one another.
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cores()))
    model = _target(settings, files.path, dtype, device, group, beside)
    shared = shared_cores(settings, device)
    runner = Runner(model, cpu=_cpu_policy(settings, model, device, shared, beside))
    drafting = load_drafting(settings, files.drafting, runner, dtype, device, shared)
    engine = LoadedEngine(
        model,
        runner,
        _layout(settings, model, drafting),
        model_digest(files.path, None if files.images is None else files.images.mmproj),
        dtype,
        parts=settings.parts,
        whole_experts=settings.expert_parallel,
        all_to_all=settings.all_to_all,
        group=group,
        images=files.images.spec if files.images is not None and settings.takes_images else None,
        encoder=_encoder(settings, files, model, dtype),
        draft=drafting.draft,
        heads=drafting.heads,
        eagle=drafting.eagle,
        memory=memory,
    )
    memory.took("weights")
    run_self_test(runner, engine.layout)
    if device.type == "cuda" and (most := settings.recorded_prompt_tokens):
        recorded = runner.record_prompts(engine.layout, most)
        log.info("%d prompt steps of up to %d tokens are recorded", recorded, most)
        memory.took("prompt steps")
    loaded = {files.path.name: model} | ({"the draft model": drafting.draft.model} if drafting.draft else {})
    for name, one in loaded.items():
        log.info(
            "loaded %s in %.1f s: %s, %s backend, %s, %d threads",
            name,
            time.monotonic() - started,
            one.computes,
            one.backend_name,
            one.device,
            runner.threads,
        )
    return engine


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of what a worker loads, checked against its settings."""

    path: Path
    images: ModelImages | None
    """Form of the images that the model reads; None: it reads none."""
    drafting: DraftingFiles


def _checked_files(settings: WorkerSettings, device: torch.device) -> _Files:
    """Return the files to load; whatever can be refused is refused before gigabytes are read.

    Raises StartupError.
    """
    if (why := why_not_together(settings, device.type)) is not None:
        raise ImpossibleSettings(why)
    transports_of(settings, device)
    path = fetched_model(settings.model)
    model_names(path, settings.model_name)
    check_max_model_len(path, settings.max_model_len)
    check_recurrent_settings(settings, shape_of(path))
    images = model_images(path, settings.mmproj)
    on_gpu = device.type == "cuda" or settings.backend == "triton"
    if images is not None and settings.takes_images:
        _check_reads_images(settings)
    if images is not None and settings.batch_invariant and on_gpu:
        raise ImpossibleSettings("--batch-invariant does not go with a model that reads images on a GPU")
    return _Files(path, images, drafting_files(settings, path))


def transports_of(settings: WorkerSettings, device: torch.device) -> tuple[str, ...]:
    """Return the transports of a worker whose blocks are on `device`. Raises UnusableTransport."""
    apart = settings.ranks_have_memories(device.type)
    # A draft model's segment of a block goes with the whole block.
    whole = apart and settings.speculative_model is not None and settings.kv_transport == "auto"
    flag = "tcp" if whole else settings.kv_transport
    return transports_for(flag, device, hosted=settings.hosted, apart=apart)


def _target(
    settings: WorkerSettings,
    path: Path,
    dtype: Precision,
    device: torch.device,
    group: RankGroup | None,
    beside: Beside,
) -> Model:
    """Return the model that the worker serves: one that is loaded already, a group's parts, or its own."""
    if beside.model is not None:
        return beside.model
    if settings.in_parts:
        return load_in_parts(settings, path, dtype, device, group)
    return load_whole(settings, path, dtype, device, settings.max_model_len)


def _cpu_policy(
    settings: WorkerSettings,
    model: Model,
    device: torch.device,
    shared: SharedCores | None,
    beside: Beside,
) -> CpuPolicy:
    return CpuPolicy(
        model.backend,
        settings.threads,
        shared=shared,
        backlog=shared_backlog(settings, device) if beside.paced else None,
        pacing=StepPacing(*settings.step_pacing),
        turns=beside.turns,
        long_turns=_entering(beside, take_long_turns),
        short_turns=_entering(beside, take_short_turns),
    )


def _entering(beside: Beside, turns: Callable[[], object]) -> Callable[[], object]:
    """Return what an engine's thread does first: take its turns on the CPU, and its stream on the GPU."""

    def enter() -> None:
        turns()
        if beside.stream is not None:
            torch.cuda.set_stream(beside.stream)

    return enter


def _encoder(settings: WorkerSettings, files: _Files, model: Model, dtype: Precision) -> ImageEncoder | None:
    if files.images is None or not settings.loads_encoder:
        return None
    images = files.images
    return load_encoder(
        files.path, model.shape.hidden_size, dtype, model.device, pair=images.pair, spec=images.spec
    )


def _layout(settings: WorkerSettings, model: Model, drafting: Drafting) -> KVLayout:
    """Return the layout of a block: the model's, with a draft's segment and groups of layers in it."""
    layout = model.kv_layout(settings.block_size)
    second = drafting.kv_layout(settings.block_size)
    if second is not None:
        layout = replace(layout, draft=second)
    if (states := describe_states(layout, model.device.type)) is not None:
        log.info("%s", states)
        return layout
    groups = _window_groups(settings, model)
    return layout if groups is None else replace(layout, windows=groups)


def _window_groups(settings: WorkerSettings, model: Model) -> WindowGroups | None:
    """Return the groups of layers that get blocks of their own; None where one block has all layers.

    What it depends on is the same for all workers of a system, or refused when they link.
    """
    groups = window_groups(model.shape.windows)
    if groups is None:
        return None
    whole = {
        "--window-blocks off": settings.window_blocks == "off",
        settings.group_flags: settings.in_parts,
        f"--speculative-model {settings.speculative_model}": settings.speculative_model is not None,
    }
    if (why := next((name for name, holds in whole.items() if holds), None)) is not None:
        log.info("blocks behind the window of %d tokens are kept: %s", groups.window, why)
        return None
    if settings.keeps_tiers:
        raise ImpossibleSettings(
            "--kv-tier holds no blocks of layers with a sliding window: set --window-blocks off, everywhere"
        )
    return groups


def _check_reads_images(settings: WorkerSettings) -> None:
    """Check the settings of a worker whose model reads images. Raises ImpossibleSettings."""
    if settings.speculative_model is not None:
        raise ImpossibleSettings("--speculative-model does not go with a model that reads images")
