"""Turns on the CPU: what the kernel says of the thread afterwards is the proof."""

import re
import threading
from pathlib import Path

import pytest

from diptych.runtime.cpu_time_slice import take_long_turns, take_short_turns


def slice_of_this_thread() -> int | None:
    """Nanoseconds by /proc; None where the kernel does not tell."""
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/sched")
    found = re.search(r"slice\s*:\s*(\d+)", stat.read_text()) if stat.exists() else None
    return int(found.group(1)) if found else None


def in_a_thread(function: object) -> object:
    """Run in a thread of its own, whose turns end with it."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return results[0]


def test_a_wish_for_turns_never_raises_and_reaches_the_kernel_where_it_is_heard() -> None:
    def wish() -> tuple[bool, int | None, bool, int | None]:
        return take_short_turns(), slice_of_this_thread(), take_long_turns(), slice_of_this_thread()

    short, after_short, long, after_long = in_a_thread(wish)  # type: ignore[misc]
    if not (short and long) or after_short is None:
        pytest.skip("this kernel takes no wishes for turns, or does not tell")
    if after_short == after_long:
        pytest.skip("this kernel is older than EEVDF's custom slices")
    assert after_short < 1_000_000 < after_long


def test_threads_inherit_the_turns_of_who_starts_them() -> None:
    def parent() -> tuple[bool, int | None, int | None]:
        return take_long_turns(), slice_of_this_thread(), in_a_thread(slice_of_this_thread)  # type: ignore[return-value]

    heard, own, inherited = in_a_thread(parent)  # type: ignore[misc]
    if not heard or own is None:
        pytest.skip("this kernel takes no wishes for turns, or does not tell")
    assert inherited == own
