"""Checks of `diptych doctor`: the packages, devices and system calls that this machine has or lacks.

A check returns a Finding. The state `missing` makes the exit status 1; `note` is for information.
"""

import ctypes
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from diptych.cli.valkey import ValkeyMissing, valkey_binary
from diptych.engine.usable_cores import usable_cores
from diptych.runtime.model_files import checked_model
from diptych.runtime.model_images import find_pairs, model_images
from diptych.runtime.python_module import PACKAGES, tree_root
from diptych.runtime.settings import BUNDLED_MODEL, StartupError, resolve_model
from gateway.model.named_models import NamedModel, parse_models

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
_WANTED_MEMORY_GIB = 2.0  # the bundled model in fp32 twice, and the default KV memory
_FILE_WIDTH = 200  # for grep: one finding, one line
_CPU_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    state: Literal["ok", "note", "missing"]
    text: str


def run_doctor(
    ports: Sequence[int], model: str | None = None, draft: str | None = None, mmproj: Path | None = None
) -> int:
    """Print every finding and return the exit status; `ports` are the defaults of `diptych up`, `model` is
    what it would serve, `draft` its draft model, `mmproj` the file with the encoder of its images.
    """
    models = () if model is None else _named(model)
    base = models[0].path if models else BUNDLED_MODEL
    table = Table(show_header=False, box=None, pad_edge=False)
    missing = False
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("Python", python),
        *((name, lambda name=name: package(name)) for name in ("torch", "grpcio", "protobuf")),
        ("triton", triton),
        ("CPU", cpu),
        ("native extension", native_extension),
        ("CUDA", cuda),
        ("GPU sharing", gpu_sharing),
        ("memory", memory),
        ("locked memory", locked_memory),
        ("memfd", memfd),
        ("pidfd", pidfd),
        ("kernels package", kernels_package),
        ("shadowed names", shadowed_names),
        ("Valkey", valkey),
        ("bundled model", bundled_model),
        *((f"port {port}", lambda port=port: free_port(port)) for port in ports),
        *((f"model {one.name or ''}".rstrip(), partial(given_model, one.path, mmproj)) for one in models),
        *(() if draft is None else (("draft model", partial(given_draft, draft, base)),)),
    ]
    for name, check in checks:
        finding = check()
        missing |= finding.state == "missing"
        table.add_row(name, _MARKS[finding.state], finding.text)
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)
    return int(missing)


def _named(model: str) -> tuple[NamedModel, ...]:
    """Return the models of ``--model``; what is no list of them is looked for as a path."""
    try:
        return parse_models(model)
    except ValueError:
        return (NamedModel(None, model),)


def given_model(model: str, mmproj: Path | None = None) -> Finding:
    """Find what a model is, what it takes, and which backend would compute it, from its files' heads."""
    # Imported here: torch takes a second, and doctor must be able to say that it cannot be imported.
    from diptych.engine.backends.native import supports as native
    from diptych.engine.backends.triton import supports as triton
    from diptych.planner.capacity import PAGES
    from diptych.planner.model_costs import kv_bytes, model_costs
    from diptych.planner.model_shape import NotPlanned, read_shape

    try:
        path = checked_model(model)
        shape, images = read_shape(path), model_images(path, mmproj)
    except (StartupError, NotPlanned) as error:
        return Finding("missing", str(error))
    costs = model_costs(shape)
    size = (
        f"{shape.family}, {shape.num_layers} layers, {costs.parameters / 1e9:.2f} billion parameters, "
        f"{costs.weight_bytes / 2**30:.1f} GiB in bf16, {shape.max_context} tokens of context"
    )
    size += f", {costs.kv_bytes / 1024:.3g} KiB a token for keys and values"
    if costs.state_bytes:
        size += f", {PAGES} x {costs.state_bytes / 2**20:.3g} MiB of recurrent states a sequence"
        size += ", one process a worker, no drafts by heads"
    if shape.latent is None and not costs.state_bytes:
        size += f" ({kv_bytes(shape, 'int8') / 1024:.3g} with --kv-cache-dtype int8 on CPUs)"
    if mmproj is None and not path.is_dir():
        for file, why in find_pairs(path)[1].items():
            size += f"; {file.name} beside it is not taken: {why}"
    if images is not None:
        spec = images.spec
        what = "square" if spec.unit else "tile"
        size += f"; images, {spec.rows_per_tile} tokens a {what} of {spec.tile[0]} x {spec.tile[1]} pixels"
        if images.mmproj is not None:
            size += f", encoded by {images.mmproj.name}"
        if find_spec("PIL") is None:
            return Finding("note", f"{size}, which need pip install 'diptych[vision]'")
    on_gpu = triton.supports(shape)
    gpus = "the Triton step on GPUs"
    if on_gpu is not None:
        gpus = f"torch on GPUs, for the Triton step lacks {on_gpu}"
    elif images is None:
        gpus += ", with --batch-invariant too"
    lacking = native.supports(shape)
    if lacking is not None:
        return Finding("note", f"{size}; torch on CPUs, for the native step lacks {lacking}; {gpus}")
    return Finding("ok" if on_gpu is None else "note", f"{size}; the native step on CPUs, {gpus}")


def given_draft(draft: str, model: str) -> Finding:
    """Find what a draft model or heads take, and whether they fit the model."""
    from diptych.planner.model_shape import NotPlanned, read_shape
    from diptych.worker_process.draft_loader import check_keeps_no_state, check_vocabulary
    from diptych.worker_process.eagle_loader import check_eagle, eagle_files
    from diptych.worker_process.medusa_loader import check_medusa, is_heads
    from diptych.worker_process.recurrent_model import check_heads_fit

    try:
        eagle = eagle_files(draft, checked_model(model))
        if eagle is not None or is_heads(resolve_model(draft)):
            shape = read_shape(checked_model(model))
            check_heads_fit(shape, draft)
            found = check_medusa(resolve_model(draft), shape) if eagle is None else check_eagle(eagle, shape)
            return Finding("ok", found)
    except (StartupError, NotPlanned) as error:
        return Finding("missing", str(error))
    finding = given_model(draft)
    if finding.state != "missing":
        try:
            check_vocabulary(checked_model(model), checked_model(draft))
            check_keeps_no_state(checked_model(draft))
        except StartupError as error:
            return Finding("missing", str(error))
    return finding


def python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    return Finding("ok" if sys.version_info >= (3, 11) else "missing", text)


def package(name: str) -> Finding:
    try:
        return Finding("ok", version(name))
    except PackageNotFoundError:
        return Finding("missing", f"pip install {name}")


def triton() -> Finding:
    found = package("triton")
    return found if found.state == "ok" else Finding("note", "not installed; only GPU kernels need it")


def cpu() -> Finding:
    info = _cpu_info()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    known = " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of the known features"
    model = info.get("model name", platform.machine())
    return Finding("ok", f"{usable_cores()} cores, {model}, {known}")


def native_extension() -> Finding:
    try:
        # Imported here: doctor must be able to say that the `kernels` package is hidden by another one.
        from kernels.cpu import library
    except ImportError as error:
        return Finding("missing", f"kernels.cpu cannot be imported: {error}")
    try:
        kinds = {
            "fp32": library.FP32,
            "bf16": library.BF16,
            "int8": library.BYTES,
            "gguf": library.BLOCKS,
        }
        best = [
            f"{next(iter(library.instruction_sets(kind)), 'none')} in {name}" for name, kind in kinds.items()
        ]
    except library.LibraryMissing as error:
        return Finding("note", f"{error}; torch computes, several times slower")
    return Finding("ok", f"instruction set: {', '.join(best)}")


def cuda() -> Finding:
    # In a process of its own: torch takes seconds to import and may fail in ways of its own.
    code = (
        "import torch\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "print(', '.join(names) or 'no device; workers compute on the CPU')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Finding("missing", f"torch cannot be imported: {last[0]}")
    return Finding("ok" if "no device" not in done.stdout else "note", done.stdout.strip())


def gpu_sharing() -> Finding:
    """Find how prefill and decode workers of this machine can share a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("note", "no CUDA driver: workers share cores, not a GPU")
    parts = (
        "also in parts" if hasattr(driver, "cuGreenCtxCreate") else "not in parts, for want of a newer driver"
    )
    return Finding(
        "ok",
        f"a GPU is shared by two processes, each with the weights; in one process with one copy of them "
        f"(--gpu-sharing turns, streams), {parts} (partition)",
    )


def memory() -> Finding:
    total, free = _mem_gib("MemTotal"), _mem_gib("MemAvailable")
    if total is None or free is None:
        return Finding("note", "unknown: no /proc/meminfo")
    text = f"{free:.1f} of {total:.1f} GiB available"
    if free < _WANTED_MEMORY_GIB:
        return Finding("note", f"{text}; {_WANTED_MEMORY_GIB:.0f} GiB are comfortable")
    return Finding("ok", f"{text} (/dev/shm is not used)")


def locked_memory() -> Finding:
    """Find how much memory a GPU worker may page-lock for its RAM tier."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "no limit: a GPU worker locks the memory of --kv-tier ram:SIZE")
    return Finding(
        "note",
        f"at most {limit / 2**20:,.1f} MiB (ulimit -l): where the GPU's driver keeps to it, a larger "
        "--kv-tier ram:SIZE is not locked, and copied more slowly; a CPU worker locks none",
    )


def memfd() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("note", "this system has none: blocks travel over TCP, not in shared memory")
    try:
        descriptor = os.memfd_create("diptych-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return Finding("note", f"refused ({error.strerror}): use --transport tcp")
    os.close(descriptor)
    return Finding("ok", "shared memory that the kernel frees with its last user")


def pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding("missing", f"Linux 5.3 or newer is needed to watch and fence processes ({error})")
    return Finding("ok", "processes are watched and fenced by proof")


def kernels_package() -> Finding:
    """Find our `kernels.cpu` under a name that a package on PyPI has as well.

    Ours is a namespace package without a file of its own in that folder, so that both may be installed.
    """
    try:
        spec = find_spec("kernels.cpu")  # imports a regular package of that name, and may fail as it does
    except ImportError as error:
        return Finding("missing", f"kernels cannot be imported: {error}")
    parent = find_spec("kernels")
    origin = parent.origin if parent is not None else None
    if spec is not None:
        return Finding(
            "ok", f"beside another package of that name: {origin}" if origin else "namespace package"
        )
    if origin is None:
        return Finding("missing", "not installed: pip install 'diptych[server]'")
    return Finding("missing", f"another package of that name hides ours: {origin}")


def shadowed_names() -> Finding:
    """Find modules on PYTHONPATH that are called as our packages are. Our commands pass over them."""
    entries = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found = [
        str(path)
        for entry in entries
        if entry.resolve() != tree_root()
        for name in PACKAGES
        for path in (entry / f"{name}.py", entry / name / "__init__.py")
        if path.exists()
    ]
    if not found:
        return Finding("ok", "none on PYTHONPATH")
    return Finding("note", f"passed over: {', '.join(found)}")


def valkey() -> Finding:
    try:
        binary = valkey_binary()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (ValkeyMissing, OSError, subprocess.TimeoutExpired) as error:
        return Finding("missing", str(error))
    if done.returncode != 0:
        return Finding("missing", f"{binary} does not run: {done.stderr.strip()}")
    return Finding("ok", done.stdout.strip())


def bundled_model() -> Finding:
    try:
        path = resolve_model("bundled")
    except FileNotFoundError as error:
        return Finding("missing", str(error))
    return Finding("ok", f"{path.name}, {path.stat().st_size / 1e6:.0f} MB")


def free_port(port: int) -> Finding:
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Finding("note", "taken by another process: choose another one, or 0 for any")
    return Finding("ok", "free")


def _cpu_info() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _mem_gib(field: str) -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{field}:")]
    return int(found[0][1]) / 2**20 if found else None
