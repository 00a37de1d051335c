"""The secret that the processes of a group on several hosts share."""

from __future__ import annotations

from pathlib import Path

from diptych.runtime.settings import StartupError

_MIN_BYTES = 16


class BadRankKey(StartupError):
    """A file with no usable secret."""


def read_rank_key(path: Path) -> bytes:
    """Return the secret of `--rank-key-file`, without white space around it. Raises BadRankKey."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise BadRankKey(f"--rank-key-file {path}: {error.strerror}") from error
    if len(key) < _MIN_BYTES:
        raise BadRankKey(
            f"--rank-key-file {path}: it has {len(key)} bytes, and at least {_MIN_BYTES} are needed"
        )
    return key
