"""Transports that do not encrypt beside --internal-tls: refused at the start, by their flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_worker.config import DecodeSettings
from diptych.runtime.settings_sources import BadSettings
from tests.diptych.runtime.authority import Authority

REACHABLE = "--host=10.0.0.1"


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--transport=gloo", REACHABLE], True),
        (["--transport=gloo"], False),  # on loopback no other host is reached
        (["--transport=gloo", REACHABLE, "--insecure-kv-network"], False),
        (["--transport=tcp", REACHABLE], False),
    ],
)
def test_groups_between_hosts_are_refused(flags: list[str], refused: bool, tmp_path: Path) -> None:
    folder = Authority().issue(tmp_path / "d", "decode")
    given = [f"--internal-tls={folder}", "--device=cpu", *flags]
    if not refused:
        tls = DecodeSettings.read_argv(given).link_tls
        assert tls is not None
        assert tls.plain_groups is ("--insecure-kv-network" in flags)
        return
    with pytest.raises(BadSettings, match="--transport gloo does not encrypt") as caught:
        DecodeSettings.read_argv(given)
    assert "--insecure-kv-network" in str(caught.value)


def test_the_exception_does_nothing_without_certificates() -> None:
    with pytest.raises(BadSettings, match="does nothing without --internal-tls"):
        DecodeSettings.read_argv(["--insecure-kv-network", "--device=cpu"])
