"""Short or long time slices on the CPU, so that no message waits for a matrix product.

With few cores the threads that compute and those that pass messages on share them, and a scheduler that
lets a computing thread finish its turn of some milliseconds adds as much to every hop. Linux 6.12 and later
take a wish for the length of a thread's turns (EEVDF, `sched_attr.sched_runtime`); a thread of short turns
runs soon after it wakes, also in place of one that is in the middle of a long one. It needs no privilege and
does not change the share of any thread. Elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SHORT_NS = 100_000
_LONG_NS = 10_000_000

_log = logging.getLogger(__name__)


class _SchedAttr(ctypes.Structure):
    """struct sched_attr, version 0 (sched_setattr(2))."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    )


def take_short_turns() -> bool:
    """Take short slices in the calling thread and those that it starts, which pass messages.

    Returns whether the kernel has set it.
    """
    return _set_slice(_SHORT_NS)


def take_long_turns() -> bool:
    """Take long slices in the calling thread and those that it starts, which compute.

    Returns whether the kernel has set it.
    """
    return _set_slice(_LONG_NS)


def _set_slice(nanoseconds: int) -> bool:
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False  # another system, or another policy is set for this process
    attr = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        sched_policy=os.SCHED_OTHER,
        sched_nice=os.getpriority(os.PRIO_PROCESS, 0),
        sched_runtime=nanoseconds,
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), 0, ctypes.byref(attr), 0) == 0:
        return True
    _log.debug("sched_setattr: %s", errno.errorcode.get(ctypes.get_errno(), "unknown error"))
    return False
