"""The lab of rows' ways: every way brings the rows, and the table has all of them."""

from __future__ import annotations

import pytest

from lab import row_ways


def test_every_way_brings_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert row_ways.main(["--rows", "600", "--width", "512", "--turns", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("600 rows of 512 float32, 1 MiB")
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[4:]] == list(row_ways.WAYS)
