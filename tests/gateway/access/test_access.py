"""Authentication of a header, and changes of the key file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from diptych.runtime.errors import PermissionDenied, Unauthenticated
from gateway.access.access import DEFAULT_TENANT, Access
from gateway.access.key_file import BadKeyFile, Scope
from tests.gateway.access.keys import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.jsonl")


@pytest.fixture
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.access.access.FileWatch", _eager)


def _eager(path: Path) -> object:
    from diptych.runtime.file_watch import FileWatch

    return FileWatch(path, every_s=0.0)


def test_access_without_a_key_file_is_anonymous() -> None:
    caller = Access(None).caller("Bearer anything", Scope.ADMIN)
    assert (caller.tenant, caller.scopes) == (DEFAULT_TENANT, {Scope.ADMIN, Scope.INFERENCE})


def test_key_determines_the_caller(keys: Keys) -> None:
    acme, admin = keys.add("acme"), keys.add("ops", "admin")
    access = Access(keys.path)
    assert access.caller(f"Bearer {acme}", Scope.INFERENCE).tenant == "acme"
    assert access.caller(f"bearer  {admin}", Scope.ADMIN).tenant == "ops"
    for key, scope in ((acme, Scope.ADMIN), (admin, Scope.INFERENCE)):
        with pytest.raises(PermissionDenied, match=f"lacks the scope {scope}"):
            access.caller(f"Bearer {key}", scope)


@pytest.mark.parametrize(
    "shape", ["", "Bearer", "Bearer ", "{key}", "Basic {key}", "Bearer {key}x", "Bearer \udcff", "Bearer é"]
)
def test_invalid_credential_is_unauthenticated(keys: Keys, shape: str) -> None:
    key = keys.add("acme")
    with pytest.raises(Unauthenticated) as caught:
        Access(keys.path).caller(shape.format(key=key), Scope.INFERENCE)
    assert key not in str(caught.value)


@pytest.mark.usefixtures("always_look")
def test_key_file_changes_apply_while_running(keys: Keys) -> None:
    first = keys.add("acme", requests_per_minute=10)
    access = Access(keys.path)
    meter = access.caller(f"Bearer {first}", Scope.INFERENCE).quota_usage
    second = keys.add("other")
    assert access.caller(f"Bearer {second}", Scope.INFERENCE).tenant == "other"
    assert access.caller(f"Bearer {first}", Scope.INFERENCE).quota_usage is meter  # what was used stays used
    keys.remove(first)
    with pytest.raises(Unauthenticated):
        access.caller(f"Bearer {first}", Scope.INFERENCE)


@pytest.mark.usefixtures("always_look")
@pytest.mark.parametrize("fault", ["a bad line", "gone", "world-readable"])
def test_bad_key_file_keeps_the_previous_keys(
    keys: Keys, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    key, leaked = keys.add("acme"), keys.add("other")
    access = Access(keys.path)
    del keys.entries[leaked]
    if fault == "gone":
        keys.path.unlink()
    else:
        keys.write("{}" if fault == "a bad line" else None)
        keys.path.chmod(0o644 if fault == "world-readable" else 0o600)
    for one, tenant in ((key, "acme"), (leaked, "other")):
        assert access.caller(f"Bearer {one}", Scope.INFERENCE).tenant == tenant
    (said,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "the API keys stay as they were, also those taken out" in said
    assert str(keys.path) in said


@pytest.mark.usefixtures("always_look")
def test_removed_key_is_refused_once_the_file_is_readable(keys: Keys) -> None:
    key, leaked = keys.add("acme"), keys.add("other")
    access = Access(keys.path)
    keys.remove(leaked)
    keys.path.chmod(0o644)  # as an editor leaves it
    assert access.caller(f"Bearer {leaked}", Scope.INFERENCE).tenant == "other"
    keys.path.chmod(0o600)
    with pytest.raises(Unauthenticated):
        access.caller(f"Bearer {leaked}", Scope.INFERENCE)
    assert access.caller(f"Bearer {key}", Scope.INFERENCE).tenant == "acme"


@pytest.mark.usefixtures("always_look")
@pytest.mark.parametrize("text", ["", "# no keys\n"])
def test_key_file_without_keys_refuses_every_call(
    keys: Keys, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    key = keys.add("acme", requests_per_minute=1)
    access = Access(keys.path)
    used = access.caller(f"Bearer {key}", Scope.INFERENCE).quota_usage
    keys.write(text)
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            access.caller(f"Bearer {key}", Scope.INFERENCE)
    assert caplog.text.count("has no key any more: every call that needs one is refused") == 1
    keys.write()
    back = access.caller(f"Bearer {key}", Scope.INFERENCE)
    assert back.tenant == "acme"
    assert back.quota_usage is used  # a minute's requests are not there anew


def test_bad_key_file_at_startup_raises(keys: Keys) -> None:
    with pytest.raises(BadKeyFile, match="cannot read"):
        Access(keys.path)
    keys.write("# no keys\n")
    with pytest.raises(BadKeyFile, match="has no key"):
        Access(keys.path)
