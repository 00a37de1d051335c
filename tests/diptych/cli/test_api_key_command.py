"""`diptych key new`: what it prints is what a gateway reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.app import app
from gateway.access.access import Access
from gateway.access.key_file import Scope


def test_key_new_prints_a_line_that_matches_the_key(tmp_path: Path) -> None:
    flags = ["--tenant", "billing", "--scope", "admin", "--scope", "inference", "--concurrent-requests", "3"]
    flags += ["--adapter", "legal", "--adapter", "team-a/*"]
    made = CliRunner().invoke(app, ["key", "new", *flags])
    assert made.exit_code == 0
    path = tmp_path / "keys.jsonl"
    path.touch(0o600)
    path.write_text(made.stdout)
    key = made.stderr.split()[-1]
    assert key not in made.stdout
    caller = Access(path).caller(f"Bearer {key}", Scope.ADMIN)
    assert (caller.tenant, caller.quota_usage.quota.concurrent_requests) == ("billing", 3)
    assert [caller.may_use(name) for name in ("legal", "team-a/x", "team-b/x")] == [True, True, False]


@pytest.mark.parametrize(
    ("flags", "told"), [(["--tenant", "a b"], "tenant"), (["--tenant", "a", "--scope", "root"], "scopes")]
)
def test_key_new_refuses_what_no_gateway_reads(flags: list[str], told: str) -> None:
    made = CliRunner().invoke(app, ["key", "new", *flags])
    assert made.exit_code == 2
    assert told in made.stderr
    assert not made.stdout
