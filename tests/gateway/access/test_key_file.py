"""Key file: entries, refusals, and that no error repeats the content of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key_file import BadKeyFile, Scope, digest_of, fresh_key, parse_keys, read_key_file
from gateway.config import GatewaySettings

GOOD = {"name": "a-1", "tenant": "a", "sha256": "0f" * 32, "scopes": ["inference", "admin"]}


def line(**changes: Any) -> str:
    return json.dumps({name: value for name, value in {**GOOD, **changes}.items() if value is not None})


def test_key_entry_has_defaults() -> None:
    text = f"# ours\n\n{line(requests_per_minute=5)}\n{line(name='b', sha256='1e' * 32, scopes=None)}\n"
    first, second = parse_keys(text, "f")
    assert (first.tenant, first.scopes) == ("a", (Scope.INFERENCE, Scope.ADMIN))
    assert (first.quota.requests_per_minute, first.quota.tokens_per_minute) == (5, None)
    assert second.scopes == (Scope.INFERENCE,)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tenant": None}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": 7}, "tenant"),
        ({"name": "x" * 65}, "name"),
        ({"sha256": "0F" * 32}, "sha256"),
        ({"sha256": "0f" * 31}, "sha256"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute"),
        ({"concurrent_requests": 2**40 + 1}, "concurrent_requests"),
        ({"dk-secret": "dk-secret"}, "not permitted"),
    ],
)
def test_bad_key_entry_error_names_the_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadKeyFile, match=rf"^f, line 2: .*{told}") as caught:
        parse_keys(f"#\n{line(**changes)}", "f")
    assert "dk-secret" not in str(caught.value)
    assert "root" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "# only\n", "{", "[]", f"{line()}\n{line(name='other')}", f"{line()}\n{line(sha256='00' * 32)}"],
)
def test_unusable_key_file_raises(text: str) -> None:
    with pytest.raises(BadKeyFile):
        parse_keys(text, "f")


def test_world_readable_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(line())
    path.chmod(0o604)
    with pytest.raises(BadKeyFile, match="chmod o-r"):
        read_key_file(path)
    path.chmod(0o640)
    assert len(read_key_file(path)) == 1


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{}"])
def test_gateway_settings_report_a_bad_key_file(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(SystemExit) as caught:
        GatewaySettings.from_argv(["--api-keys-file", str(path)])
    assert caught.value.code == 2
    assert "--api-keys-file (DIPTYCH_API_KEYS_FILE)" in capsys.readouterr().err


def test_fresh_keys_are_long_and_distinct() -> None:
    keys = {fresh_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 46 and len(digest_of(key)) == 32 for key in keys)
