"""Calls of the CUDA driver that torch does not offer: IPC handles, page-locked pages, stream writes.

By ctypes from libcuda.so.1, which comes with the driver, so that no toolkit and no version of the runtime has
to be found. Names and signatures are those of the CUDA Driver API reference. torch's own sharing of tensors
is not used: it counts references in files under /dev/shm, which a killed worker would leave behind.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_REGISTER_PORTABLE_MAPPED = 3
_Pointer = ctypes.c_uint64


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaError(OSError):
    """Failed call of the driver."""


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(_Pointer), _IpcHandle, ctypes.c_uint]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_IpcHandle), _Pointer]
    library.cuIpcCloseMemHandle.argtypes = [_Pointer]
    library.cuMemGetAddressRange_v2.argtypes = [
        ctypes.POINTER(_Pointer),
        ctypes.POINTER(ctypes.c_size_t),
        _Pointer,
    ]
    library.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    library.cuMemHostGetDevicePointer_v2.argtypes = [
        ctypes.POINTER(_Pointer),
        ctypes.c_void_p,
        ctypes.c_uint,
    ]
    library.cuStreamWriteValue64_v2.argtypes = [ctypes.c_void_p, _Pointer, ctypes.c_uint64, ctypes.c_uint]
    library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
    library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    library.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        why = text.value.decode() if text.value else "unknown error"
        raise CudaError(f"{name}: {why} ({status})")


@functools.cache
def _context(index: int) -> int:
    """Return the primary context, which is also torch's; it is retained for as long as the process lives."""
    _call("cuInit", ctypes.c_uint(0))
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    if context.value is None:
        raise CudaError("cuDevicePrimaryCtxRetain: no context")
    return context.value


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Make the device's context current on this thread, and restore the earlier one at the end."""
    _call("cuCtxPushCurrent_v2", _context(device.index or 0))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def export_memory(device: torch.device, address: int) -> tuple[bytes, int]:
    """Return the IPC handle of the allocation that holds `address`, and the offset of the address in bytes.

    Raises CudaError, for example for memory of an allocator with expandable segments.
    """
    handle, base, size = _IpcHandle(), _Pointer(), ctypes.c_size_t()
    with _current(device):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
    return bytes(handle), address - base.value


def open_memory(device: torch.device, handle: bytes) -> int:
    """Map another process' allocation for `device`, with peer access; return the address.

    Raises CudaError.
    """
    opened, structure = _Pointer(), _IpcHandle.from_buffer_copy(handle)
    with _current(device):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), structure, _LAZY_PEER_ACCESS)
    return opened.value


def close_memory(device: torch.device, base: int) -> None:
    """Unmap an allocation, once for each time that it was opened. Raises CudaError."""
    with _current(device):
        _call("cuIpcCloseMemHandle", base)


def register_page(device: torch.device, address: int, nbytes: int) -> int:
    """Page-lock pages of this process for the GPU and return their device address. Raises CudaError."""
    pointer = _Pointer()
    with _current(device):
        _call("cuMemHostRegister_v2", address, nbytes, _REGISTER_PORTABLE_MAPPED)
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), address, 0)
    return pointer.value


def unregister_page(device: torch.device, address: int) -> None:
    """Undo `register_page`. Raises CudaError."""
    with _current(device):
        _call("cuMemHostUnregister", address)


def write_in_stream_order(device: torch.device, stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Write eight bytes after everything in the stream, which the whole system sees by then.

    The default flags of the call put a fence of system scope before the write. Raises CudaError.
    """
    with _current(device):
        _call("cuStreamWriteValue64_v2", stream.cuda_stream, address, value, 0)
