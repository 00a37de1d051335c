"""`diptych model`: what it prints, and to which system it speaks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from diptych.cli.model_commands import _up_port, alias_line, model_table, set_alias
from diptych.v1 import admin_pb2 as pb


def test_table_shows_why_a_model_is_not_ready() -> None:
    models = [
        pb.ServedModel(name="a", digest="1" * 64, path="/m/a", ready=True, running=3),
        pb.ServedModel(name="b", digest="2" * 64, path="/m/b", detail="no decode worker is linked"),
        pb.ServedModel(name="b", digest="3" * 64, path="/m/c", ready=True, leaving=True),
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(model_table(models))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["model", "digest", "state", "running", "path"]
    assert lines[1] == ["a", "1" * 12, "ready", "3", "/m/a"]
    assert "no decode worker is linked" in " ".join(lines[2])
    assert lines[3] == ["b", "3" * 12, "leaving", "0", "/m/c"]


def test_alias_is_shown_by_shares() -> None:
    shares = [pb.ModelShare(model="a", weight=9), pb.ModelShare(model="b", weight=1)]
    assert alias_line(pb.ModelAlias(name="chat", shares=shares)) == "chat stands for a 90%, b 10%"


def test_alias_that_is_none_is_refused_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert set_alias("127.0.0.1:1", None, "chat", ["a", "a"]) == 1
    assert capsys.readouterr().err == "diptych: chat must stand for other models, and for each once\n"


@pytest.mark.parametrize(
    ("address", "given", "port"),
    [
        ("127.0.0.1:50052", None, 50051),
        ("localhost:7", None, 6),
        ("10.0.0.1:50052", None, None),
        ("10.0.0.1:50052", 5, 5),
    ],
)
def test_up_of_this_machine_is_that_before_a_loopback_admin_port(
    address: str, given: int | None, port: int | None
) -> None:
    assert _up_port(address, given) == port
