"""Models of the Hugging Face Hub: downloaded into its own cache, and found there again without a network.

A model is `OWNER/NAME`, `OWNER/NAME@REVISION`, or `OWNER/NAME/FILE.gguf`. Files that came stay when a
download breaks, so that the next one goes on with the others. What came is compared with the hashes that the
Hub gave, once: git's of small files, SHA-256 of large ones, by which the cache names them.

Variables are the Hub's: HF_HOME or HF_HUB_CACHE is where, HF_ENDPOINT another server, HF_TOKEN the key, and
HF_HUB_OFFLINE=1 downloads nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Final, NamedTuple

from diptych.runtime.startup_error import StartupError

_NAME: Final = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_FILE: Final = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)/(?P<file>[\w./-]+\.gguf)")
_WANTED: Final = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_UNWANTED: Final = ("*/*",)  # copies in other forms: onnx/, original/, …
_CHECKED: Final = "diptych-checked"
_SHA1, _SHA256 = 40, 64  # hex digits
_CHUNK: Final = 1 << 20
_log = logging.getLogger(__name__)


class HubError(StartupError):
    """A model of the Hub cannot be had. The message says why and what to do."""


class HubModel(NamedTuple):
    """Model of the Hub; ``file`` is the one GGUF file of it, empty for a folder."""

    repo: str
    revision: str | None
    file: str

    @classmethod
    def parse(cls, model: str) -> HubModel | None:
        """Return the model that a text names; None where it is a path of this machine, or no name."""
        path = Path(model).expanduser()
        if path.exists() or path.parent.is_dir():
            return None
        if (found := _FILE.fullmatch(model)) is not None:
            return cls(found["repo"], None, found["file"])
        if path.suffix != ".gguf" and (found := _NAME.fullmatch(model)) is not None:
            return cls(found["repo"], found["revision"], "")
        return None

    @property
    def patterns(self) -> list[str]:
        """Return the files that are wanted."""
        return [self.file] if self.file else list(_WANTED)


def cached_model(model: HubModel) -> Path | None:
    """Return the path of a model that was downloaded, without a network; None for one that was not."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(model, local=True)
    except LocalEntryNotFoundError:  # or not all of it is there
        return None
    path = folder / model.file
    return path if _marker(folder, model).exists() and path.exists() else None


def download_model(model: HubModel) -> Path:
    """Return the path of a model, downloaded unless it is there. Raises HubError.

    Progress is shown on a terminal.
    """
    if (cached := cached_model(model)) is not None:
        return cached
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    _log.info("model %s: downloading to %s", model.repo, constants.HF_HUB_CACHE)
    try:
        folder = _snapshot(model, local=False)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HubError(f"{model.repo} cannot be downloaded from {constants.ENDPOINT}: {reason}") from error
    if model.file and not (folder / model.file).exists():
        raise HubError(f"{model.repo} has no {model.file}")
    _check(folder, model)
    _log.info("model %s: downloaded, its checksums are right", model.repo)
    return folder / model.file


def _snapshot(model: HubModel, *, local: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = snapshot_download(
        model.repo,
        revision=model.revision,
        allow_patterns=model.patterns,
        ignore_patterns=None if model.file else list(_UNWANTED),
        library_name="diptych",
        local_files_only=local,
    )
    return Path(folder)


def _check(folder: Path, model: HubModel) -> None:
    """Compare the files of a snapshot with their hashes, and note that. Raises HubError, the file removed."""
    files = [folder / model.file] if model.file else [path for path in folder.iterdir() if path.is_file()]
    for path in files:
        blob = path.resolve()
        if blob != path and not _is_right(blob):
            blob.unlink()
            path.unlink()
            raise HubError(f"{path.name} of {model.repo} came damaged: start again, which downloads it anew")
    marker = _marker(folder, model)
    marker.parent.mkdir(exist_ok=True)
    marker.touch()


def _is_right(blob: Path) -> bool:
    """Return whether a file's content has the hash that is its name; True where the name is none."""
    if re.fullmatch(r"[0-9a-f]+", blob.name) is None or len(blob.name) not in (_SHA1, _SHA256):
        return True
    if len(blob.name) == _SHA256:
        digest = hashlib.sha256()
    else:  # git's hash of a file
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == blob.name


def _marker(folder: Path, model: HubModel) -> Path:
    """Return the file that is there once a snapshot, or the one file of it, was compared."""
    name = f"{folder.name}{'.' + model.file.replace(os.sep, '--') if model.file else ''}"
    return folder.parent.parent / _CHECKED / name
