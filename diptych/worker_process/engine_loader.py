"""Loading of a worker's model: weights, CPU policy, runner, digest and self-test."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from diptych.engine.card_turns import CardTurns
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.device import choose_device
from diptych.engine.dtype import Precision, choose_precision
from diptych.engine.gpu_memory import GpuMemory
from diptych.engine.gpu_precision import packs_on_gpu
from diptych.engine.kv.window_groups import WindowGroups, window_groups
from diptych.engine.loaded_model import Model, load_model, native_step_works
from diptych.engine.parallel.stages import Grid
from diptych.engine.runner import Runner
from diptych.engine.shared_backlog import SharedBacklog
from diptych.engine.shared_cores import SharedCores
from diptych.engine.step_pacing import StepPacing
from diptych.engine.usable_cores import usable_cores
from diptych.engine.vision.registry import load_encoder
from diptych.engine.weights.checkpoint import has_kquants, is_quantised, weight_bytes
from diptych.runtime.cpu_time_slice import take_long_turns, take_short_turns
from diptych.runtime.host_port import parse_address
from diptych.runtime.model_context import check_max_model_len
from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_files import checked_model, fetched_model
from diptych.runtime.model_images import model_images
from diptych.runtime.model_name import model_names
from diptych.runtime.settings import DType, StartupError, cpu_features, resolve_model
from diptych.runtime.weight_store.client import HostWeights
from diptych.worker_process.config import WorkerSettings, why_not_together
from diptych.worker_process.draft_loader import LoadedDraft, check_vocabulary
from diptych.worker_process.eagle_loader import EagleFiles, eagle_files, load_eagle
from diptych.worker_process.group.load import computes_natively, load_in_parts
from diptych.worker_process.group.rank_group import OtherHosts, RankCannotStart, RankGroup
from diptych.worker_process.group.rank_key import read_rank_key
from diptych.worker_process.group.rendezvous import Rendezvous
from diptych.worker_process.loaded_engine import LoadedEngine
from diptych.worker_process.medusa_loader import is_heads, load_medusa
from diptych.worker_process.self_test import run_self_test
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
        group = RankGroup(grid, name, settings.log_level, _other_hosts(settings))
    return await asyncio.to_thread(_load_on_stream, settings, group, beside)


def _other_hosts(settings: WorkerSettings) -> OtherHosts | None:
    """Listen for the ranks of other hosts, if there are any. Raises StartupError."""
    if not settings.remote_ranks or settings.rank_key_file is None:
        return None
    key = read_rank_key(settings.rank_key_file)
    try:
        meeting = Rendezvous(*parse_address(settings.rendezvous), key)
    except OSError as error:
        raise RankCannotStart(f"--rendezvous {settings.rendezvous}: {error.strerror}") from error
    return OtherHosts(settings.remote_ranks, meeting)


def _load_on_stream(settings: WorkerSettings, group: RankGroup | None, beside: Beside) -> LoadedEngine:
    with torch.cuda.stream(beside.stream):
        return _load(settings, group, beside)


def _load(settings: WorkerSettings, group: RankGroup | None, beside: Beside) -> LoadedEngine:
    take_long_turns()  # inherited by the threads that the first step starts, which compute later ones too
    started = time.monotonic()
    device = choose_device(settings.device)
    if (why := why_not_together(settings, device.type)) is not None:
        raise ImpossibleSettings(why)
    transports_for(settings.kv_transport, device, hosted=settings.hosted)  # refused before gigabytes are read
    path = fetched_model(settings.model)
    model_names(path, settings.model_name)
    check_max_model_len(path, settings.max_model_len)
    seen = model_images(path, settings.mmproj)
    images = seen.spec if seen is not None and settings.takes_images else None
    if images is not None:
        _check_reads_images(settings)
    files = _drafting_files(settings, path)
    memory = GpuMemory.of(device)
    dtype = _precision(settings, path, device)
    # Weights are converted in torch: more threads than this worker has cores wait for one another.
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cores()))
    if beside.model is not None:
        model = beside.model
    elif settings.in_parts:
        model = load_in_parts(settings, path, dtype, device, group)
    else:
        model = _model(settings, path, dtype, device, settings.max_model_len)
    shared = _shared_cores(settings, device)
    cpu = CpuPolicy(
        model.backend,
        settings.threads,
        shared=shared,
        backlog=_shared_backlog(settings, device) if beside.paced else None,
        pacing=StepPacing(*settings.step_pacing),
        turns=beside.turns,
        long_turns=_entering(beside, take_long_turns),
        short_turns=_entering(beside, take_short_turns),
    )
    runner = Runner(model, cpu=cpu)
    layout = model.kv_layout(settings.block_size)
    hidden = model.shape.hidden_size
    encoder = None
    if seen is not None and settings.loads_encoder:
        encoder = load_encoder(path, hidden, dtype, model.device, pair=seen.pair)
    draft = None if files.model is None else _draft(settings, files.model, device, shared)
    if draft is not None:
        layout = replace(layout, draft=draft.model.kv_layout(settings.block_size))
    groups = _window_groups(settings, model, images=seen is not None)
    if groups is not None:
        layout = replace(layout, windows=groups)
    heads = eagle = None
    if files.medusa is not None and settings.decodes:
        heads = load_medusa(files.medusa, runner, dtype)
    if files.eagle is not None:
        eagle = load_eagle(files.eagle, runner, dtype)
        layout = replace(layout, draft=eagle.head.kv_layout(settings.block_size))
    engine = LoadedEngine(
        model,
        runner,
        layout,
        model_digest(path, None if seen is None else seen.mmproj),
        dtype,
        parts=settings.parts,
        whole_experts=settings.expert_parallel,
        group=group,
        images=images,
        encoder=encoder,
        draft=draft,
        heads=heads,
        eagle=eagle,
        memory=memory,
    )
    memory.took("weights")
    run_self_test(runner, layout)
    if device.type == "cuda" and (most := settings.recorded_prompt_tokens):
        log.info("%d prompt steps of up to %d tokens are recorded", runner.record_prompts(layout, most), most)
        memory.took("prompt steps")
    loaded = {path.name: model} if draft is None else {path.name: model, "the draft model": draft.model}
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


def _entering(beside: Beside, turns: Callable[[], object]) -> Callable[[], object]:
    """Return what an engine's thread does first: take its turns on the CPU, and its stream on the GPU."""

    def enter() -> None:
        turns()
        if beside.stream is not None:
            torch.cuda.set_stream(beside.stream)

    return enter


@dataclass(frozen=True, slots=True)
class _DraftingFiles:
    """Files of what drafts, of which one at most is given."""

    model: Path | None = None
    medusa: Path | None = None
    eagle: EagleFiles | None = None


def _drafting_files(settings: WorkerSettings, model: Path) -> _DraftingFiles:
    """Return the files that --speculative-model names for `model`. Raises StartupError."""
    if settings.speculative_model is None:
        return _DraftingFiles()
    if (eagle := eagle_files(settings.speculative_model, model)) is not None:
        _check_hidden_rows(settings, eagle.kind)
        return _DraftingFiles(eagle=eagle)
    found = resolve_model(settings.speculative_model)
    if is_heads(found):
        _check_hidden_rows(settings, "Medusa")
        return _DraftingFiles(medusa=found)
    path = checked_model(settings.speculative_model)
    check_vocabulary(model, path)
    return _DraftingFiles(model=path)


def _check_hidden_rows(settings: WorkerSettings, kind: str) -> None:
    """Check that this worker has the rows that heads of a kind draft from. Raises ImpossibleSettings."""
    if settings.in_parts:
        raise ImpossibleSettings(
            f"--speculative-model {settings.speculative_model} ({kind}) does not go with "
            f"{settings.group_flags}: groups give no hidden rows; prompt lookup and draft models do"
        )


def _model(
    settings: WorkerSettings, path: Path, dtype: Precision, device: torch.device, max_context: int | None
) -> Model:
    return load_model(
        path,
        dtype,
        backend=settings.backend,
        device=device,
        kv_cache=settings.kv_cache_dtype,
        max_context=max_context,
        store=HostWeights(settings.weight_holder or None) if settings.share_weights else None,
    )


def _draft(
    settings: WorkerSettings, path: Path, device: torch.device, shared: SharedCores | None
) -> LoadedDraft:
    """Load the draft model, which computes on the same cores, between the model's steps."""
    model = _model(settings, path, _precision(settings, path, device), device, None)
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


def _window_groups(settings: WorkerSettings, model: Model, *, images: bool) -> WindowGroups | None:
    """Return the groups of layers that get blocks of their own; None where one block has all layers.

    What it depends on is the same for all workers of a system, or refused when they link.
    """
    groups = window_groups(model.shape.windows)
    if groups is None or settings.window_blocks == "off":
        return None
    whole = {
        settings.group_flags: settings.in_parts,
        f"--speculative-model {settings.speculative_model}": settings.speculative_model is not None,
        f"--kv-cache-dtype {settings.kv_cache_dtype}": settings.kv_cache_dtype != "auto",
        f"the {model.backend_name} step": model.backend_name not in ("native", "torch"),
        f"blocks on {model.device}": model.device.type != "cpu",
        "a model that reads images": images,
    }
    if (why := next((name for name, holds in whole.items() if holds), None)) is not None:
        log.info("blocks behind the window of %d tokens are kept: %s", groups.window, why)
        return None
    if settings.keeps_tiers:
        raise ImpossibleSettings(
            "--kv-tier holds no blocks of layers with a sliding window: set --window-blocks off, everywhere"
        )
    return groups


class ImpossibleSettings(StartupError):
    """Settings that do not go together on the device of this worker."""


def _check_reads_images(settings: WorkerSettings) -> None:
    """Check the settings of a worker whose model reads images. Raises ImpossibleSettings."""
    if settings.in_parts:
        raise ImpossibleSettings(f"{settings.group_flags} does not go with a model that reads images")
    if settings.speculative_model is not None:
        raise ImpossibleSettings("--speculative-model does not go with a model that reads images")


def _precision(settings: WorkerSettings, path: Path, device: torch.device) -> Precision:
    on_gpu = device.type == "cuda" or settings.backend == "triton"
    in_parts = settings.in_parts
    return precision_of(
        settings.engine_dtype,
        path,
        on_gpu=on_gpu,
        native=(not in_parts or computes_natively(settings, path)) and settings.backend != "torch",
        in_parts=in_parts,
    )


def precision_of(
    chosen: Literal["auto"] | DType,
    path: Path,
    *,
    on_gpu: bool,
    native: bool = True,
    in_parts: bool = False,
) -> Precision:
    """Return the precision of the model at `path`, for --dtype or --quantization `chosen`.

    `native`: the native step may compute it, where it works at all. `in_parts`: by ranks of a group.
    """
    if chosen != "auto":
        return "w8a8" if on_gpu and chosen == "int8" else chosen
    return choose_precision(
        # Parts of a folder's codes are not read (diptych/engine/weights/reader.py).
        quantised_file=is_quantised(path) and (not in_parts or path.is_file()),
        native=native and native_step_works(),
        cpu_features=cpu_features(),
        on_gpu=on_gpu,
        packs=on_gpu and packs_on_gpu(path),
        file_bytes=weight_bytes(path),
        kquants=has_kquants(path),
        in_parts=in_parts,
    )


def _shared_cores(settings: WorkerSettings, device: torch.device) -> SharedCores | None:
    """Return the cores that workers lend each other; None on a device, whose steps need none of them."""
    if settings.cores_fd is None or device.type != "cpu":
        return None
    return SharedCores(settings.cores_fd, home=_home(settings), cores=settings.machine_cores)


def _shared_backlog(settings: WorkerSettings, device: torch.device) -> SharedBacklog | None:
    """Return the waiting times of the workers on one GPU; None on a CPU, where they lie with the cores."""
    if settings.cores_fd is None or device.type != "cuda":
        return None
    gpu = torch.cuda.current_device() if device.index is None else device.index
    if not settings.hosted:
        log.info("GPU %d is shared with the workers of this machine: decode makes room for prompts", gpu)
    return SharedBacklog(settings.cores_fd, own=_home(settings)[0], cores=settings.machine_cores, gpu=gpu)


def _home(settings: WorkerSettings) -> list[int]:
    return [int(core) for core in settings.home_cores.split(",") if core]
