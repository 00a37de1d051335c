"""`--ray` of the command line: an address or none, and a package that may be missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli.app import app
from diptych.cli.ray_cluster import foreground


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["--ray"], "local"),
        (["--ray", "--log-level", "debug"], "local"),
        (["--ray", "10.0.0.1:6379"], "10.0.0.1:6379"),
        (["--ray=auto"], "auto"),
        (["--log-level", "debug", "--ray", "auto", "--insecure"], "auto"),
    ],
)
def test_ray_takes_an_address_or_none(
    arguments: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def serve(options: Any, address: str, **others: Any) -> int:
        asked.append(address)
        return 0

    monkeypatch.setattr(foreground, "serve_on_ray", serve)
    assert CliRunner().invoke(app, ["up", *arguments]).exit_code == 0
    assert asked == [address]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = CliRunner().invoke(app, ["up", "--ray", "--grpc-port=0", "--http-port=0"])
    assert refused.exit_code == 1
    assert "--ray needs the package 'ray': pip install 'diptych[ray]'" in refused.stderr


def test_targets_without_ray_are_refused() -> None:
    refused = CliRunner().invoke(app, ["up", "--ray-targets", "t.json"])
    assert refused.exit_code == 2
    assert "needs --ray" in refused.stderr
