"""Files that change: seen once each, however they are replaced."""

from __future__ import annotations

import os
from pathlib import Path

from diptych.runtime.file_watch import FileWatch, readable_by_all


def test_each_change_is_seen_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("a")
    now = 0.0
    watch = FileWatch(one, two, every_s=1.0, clock=lambda: now)
    now = 1.5
    assert not watch.changed()
    two.write_text("longer")
    assert not watch.changed()  # within the second
    now = 3.0
    assert watch.changed()
    assert not watch.changed()
    (tmp_path / "new").write_text("b")
    os.replace(tmp_path / "new", one)  # same size; another inode
    now = 5.0
    assert watch.changed()
    one.unlink()
    now = 7.0
    assert watch.changed()
    assert not watch.changed()
    one.write_text("back")
    now = 9.0
    assert watch.changed()


def test_changed_sees_a_change_of_permissions(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o644)
    watch = FileWatch(path, every_s=0.0)
    assert not watch.changed()
    path.chmod(0o600)
    assert watch.changed()
    assert not watch.changed()


def test_what_could_not_be_used_is_tried_again_and_said_once_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_text("half")
    now = 0.0
    watch = FileWatch(path, every_s=1.0, clock=lambda: now)
    path.write_text("half written")
    said = []
    for now in range(1, 121):
        assert watch.changed()
        if watch.failed("it is half written"):
            said.append(now)
    assert said == [1, 61]
    assert watch.failed("it is gone")
    now = 121
    assert watch.changed()  # and could be used
    now = 122
    assert not watch.changed()
    path.write_text("half written again")
    now = 123
    assert watch.changed()
    assert watch.failed("it is gone")  # anew


def test_readable_by_all_reads_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch()
    for mode, found in ((0o600, False), (0o640, False), (0o644, True), (0o604, True)):
        path.chmod(mode)
        assert readable_by_all(path) is found
