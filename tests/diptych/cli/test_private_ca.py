"""Certificates of our own authority: taken by programs, renewed, and kept from others."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.app import app
from diptych.cli.private_ca import with_certificates
from diptych.cli.stack import ROLES
from diptych.cli.stack_options import StackOptions
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.tls import BadTlsFiles


def test_certificates_are_taken_by_their_role_alone_and_renewed_by_the_same_authority(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    made = CliRunner().invoke(app, ["certificates", str(folder)])
    assert made.exit_code == 0, made.output
    for role in ROLES:
        InternalTls(folder / role, role)
        assert f"--internal-tls {folder / role}" in made.stdout
        for name, mode in (("tls.key", 0o600), ("tls.crt", 0o644), ("ca.crt", 0o644)):
            assert (folder / role / name).stat().st_mode & 0o777 == mode
        assert not (folder / role / "ca.key").exists()
    with pytest.raises(BadTlsFiles, match="Hostname mismatch"):
        InternalTls(folder / "prefill", "decode")
    before = [(folder / "decode" / name).read_bytes() for name in ("tls.crt", "ca.crt")]
    assert CliRunner().invoke(app, ["certificates", str(folder)]).exit_code == 0
    after = [(folder / "decode" / name).read_bytes() for name in ("tls.crt", "ca.crt")]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
    (folder / "ca.key").write_text("no key")
    refused = CliRunner().invoke(app, ["certificates", str(folder)])
    assert refused.exit_code == 2
    assert after == [(folder / "decode" / name).read_bytes() for name in ("tls.crt", "ca.crt")]


def test_auto_makes_a_folder_for_the_run_without_the_authoritys_key() -> None:
    with with_certificates(StackOptions(internal_tls="auto")) as options:
        folder = Path(str(options.internal_tls))
        assert folder.stat().st_mode & 0o077 == 0
        assert {path.name for path in folder.rglob("*.key")} == {"tls.key"}
        for role in ROLES:
            InternalTls(folder / role, role)
    assert not folder.exists()
