"""Statuses of calls of the native library."""

from __future__ import annotations

import ctypes

from kernels.cpu import library as native


class NativeError(RuntimeError):
    """The native step refused a batch or ran out of memory. Nothing was written to any block."""


def check(library: ctypes.CDLL, status: int) -> None:
    """Raise NativeError with the library's words unless a call succeeded."""
    if status != native.OK:
        raise NativeError(native.last_error(library))
