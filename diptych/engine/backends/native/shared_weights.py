"""Files of packed weights: one process of a host packs a model into a file in memory, the others map it.

The file has no name and is sealed once it is whole (memfd_create(2)), so that what is mapped can never
change and never fault. `WeightStore` says who packs: of all processes that want the file of a key one is
asked to, and the others get the file when it is done, or the turn when that process dies.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from diptych.engine.backends.native.status import NativeError
from diptych.engine.weights import Storage
from diptych.engine.weights.store import WeightStore

_log = logging.getLogger(__name__)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_MOST_TIMES = 32
_MOST_MORE = 1 << 30
"""Address space for a model's packed weights: the file's size times the first, for codes of one bit become
32, and so many bytes. It costs no memory.
"""
T = TypeVar("T")


class MappedWeights(NamedTuple):
    """A whole file of packed weights, which the native step maps."""

    file: int
    storage: Storage


class EmptyFile(NamedTuple):
    """A file in which weights are to be packed."""

    file: int
    most_bytes: int


def from_store(
    store: WeightStore,
    key: str,
    file_bytes: int,
    take: Callable[[int], T],
    pack: Callable[[EmptyFile | None], T],
    unchanged: Callable[[], bool],
) -> T:
    """Return what `take` makes of the store's file of `key`, or what `pack` makes, which fills one for the
    others.

    `file_bytes` is the size of the model's files; `unchanged` says whether they are those of the key still.
    Where there is no store, or its file cannot be used, `pack` is called without a file: this process has
    its own copy.
    """
    try:
        file = store.obtain(key)
    except OSError as error:
        _log.warning("packed weights are this process' own: %s", error)
        return pack(None)
    if file is not None:
        try:
            return take(file)
        except NativeError as error:
            _log.warning("packed weights are this process' own: %s", error)
            return pack(None)
        finally:
            os.close(file)
    made, file = None, -1
    try:
        file = os.memfd_create("diptych-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        made = pack(EmptyFile(file, _MOST_TIMES * file_bytes + _MOST_MORE))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        if not unchanged():
            raise OSError("the model's files changed while they were read")
        store.publish(key, file)
    except (OSError, NativeError) as error:
        _log.warning("packed weights are this process' own: %s", error)
        store.give_up(key)
        return pack(None) if made is None else made
    except BaseException:
        store.give_up(key)
        raise
    finally:
        if file >= 0:
            os.close(file)
    return made
