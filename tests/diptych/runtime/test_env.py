"""A mistyped variable is told, by name and not by value; whatever anything reads is known."""

import re
from pathlib import Path

import pytest

from decode_worker.config import DecodeSettings
from diptych.cli.stack_options import FLAG_FIELDS
from diptych.runtime.env import KNOWN, SETTINGS, unknown_variables
from diptych.runtime.settings import ProgramSettings
from gateway.config import GatewaySettings
from prefill_worker.config import PrefillSettings

ROOT = Path(__file__).parents[3]
SOURCES = ("*/*.py", "*/*/*.py", "*/*/*/*.py", "*.md", "docs/*.md", "deploy/*", "Makefile", "setup.py")
NOT_OURS = {"tests", "build", ".venv"}


def test_every_setting_is_known() -> None:
    programs = (GatewaySettings, PrefillSettings, DecodeSettings)
    fields = {field for settings in programs for field in settings.model_fields}
    fields |= set(FLAG_FIELDS)
    assert {f"DIPTYCH_{field.upper()}" for field in fields} == SETTINGS


def test_every_variable_that_is_named_anywhere_is_known() -> None:
    named = {
        name
        for pattern in SOURCES
        for path in ROOT.glob(pattern)
        if path.is_file() and path.relative_to(ROOT).parts[0] not in NOT_OURS
        for name in re.findall(r"\bDIPTYCH_[A-Z_]*[A-Z](?![A-Z_{])", path.read_text())
    }
    assert {"DIPTYCH_API_KEY", "DIPTYCH_NATIVE_LIBRARY", "DIPTYCH_PREFILL_CORES"} <= named
    assert named - KNOWN == set()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DIPTYCH_MAX_BACTH", "DIPTYCH_MAX_BACTH (DIPTYCH_MAX_BATCH?)"),
        ("DIPTYCH_NONSENSE", "DIPTYCH_NONSENSE"),
    ],
)
def test_unknown_variables_names_a_mistyped_one_without_its_value(name: str, told: str) -> None:
    assert unknown_variables({name: "s3cret", "PATH": "/"}) == f"variables that nothing reads: {told}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DIPTYCH_MAX_BATCH", "8"),
        ("diptych_max_batch", "8"),
        ("DIPTYCH_CA_FILE", "ca.pem"),
        ("DIPTYCH_GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("DIPTYCH_GATEWAY_PORT", "tcp://10.0.0.1:50051"),
        ("DIPTYCH_GATEWAY_PORT_50051_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_unknown_variables_skips_known_ones_and_the_platforms(name: str, value: str) -> None:
    assert unknown_variables({name: value}) is None


def test_from_argv_warns_of_unknown_variables_unless_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIPTYCH_MAX_BACTH", "8")
    ProgramSettings.from_argv([])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("diptych diptych: variables that nothing reads: DIPTYCH_MAX_BACTH")
    ProgramSettings.from_argv(["--death-fd", "9"])
    assert capsys.readouterr().err == ""
