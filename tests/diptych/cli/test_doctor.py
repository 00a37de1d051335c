import resource
import socket
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from diptych.cli import doctor
from tests import mmproj_twins, vision_models
from tests.diptych.engine.models.published_hybrids import PUBLISHED
from tests.diptych.runtime.odd_models import WHOLE, folder


def test_a_machine_that_runs_this_suite_has_all_that_is_essential(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run_doctor([0]) == 0
    said = capsys.readouterr().out
    assert "missing" not in said
    for name in ("Python", "torch", "Valkey", "bundled model", "pidfd", "kernels package"):
        assert name in said


def test_a_missing_package_is_missing() -> None:
    assert doctor.package("diptych-has-no-such-dependency").state == "missing"


def test_a_taken_port_is_worth_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert doctor.free_port(port).state == "note"
    assert doctor.free_port(port).state == "ok"


@pytest.mark.parametrize(
    ("limit", "state", "text"),
    [(resource.RLIM_INFINITY, "ok", "no limit"), (8 << 20, "note", "at most 8.0 MiB")],
)
def test_limit_of_locked_memory_is_named(
    limit: int, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    found = doctor.locked_memory()
    assert found.state == state
    assert text in found.text


@pytest.mark.parametrize(
    ("origins", "state", "text"),
    [
        ({"kernels": None, "kernels.cpu": "/ours"}, "ok", "namespace package"),
        ({"kernels": "/theirs", "kernels.cpu": "/ours"}, "ok", "/theirs"),
        ({"kernels": "/theirs"}, "missing", "hides ours: /theirs"),
        ({}, "missing", "not installed"),
    ],
)
def test_a_package_that_hides_kernels_is_missing_and_one_beside_it_is_not(
    origins: dict[str, str | None], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=origins[name]) if name in origins else None

    monkeypatch.setattr(doctor, "find_spec", find_spec)
    found = doctor.kernels_package()
    assert (found.state, text in found.text) == (state, True)


def test_shadowed_names_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.shadowed_names().state == "ok"
    (tmp_path / "gateway.py").touch()
    (tmp_path / "worker.py").touch()
    assert doctor.shadowed_names() == doctor.Finding("note", f"passed over: {tmp_path / 'gateway.py'}")


def test_given_model_is_described_with_the_backend_that_computes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(folder(tmp_path / "m", {**WHOLE, "config.json": {"model_type": "starcoder2"}}))
    for why, state, text in (
        (None, "ok", "the native step on CPUs, the Triton step on GPUs"),
        (
            "LayerNorm",
            "note",
            "torch on CPUs, for the native step lacks LayerNorm; torch on GPUs",
        ),
    ):
        for backend in ("native", "triton"):
            module = import_module(f"diptych.engine.backends.{backend}.supports")
            monkeypatch.setattr(module, "supports", lambda _, why=why: why)
        found = doctor.given_model(model)
        assert found.state == state
        assert "starcoder2, 30 layers, 3.03 billion parameters, 5.6 GiB in bf16" in found.text
        assert "30 KiB a token for keys and values (15.5 with --kv-cache-dtype int8 on CPUs)" in found.text
        assert text in found.text


@pytest.mark.parametrize(
    ("name", "states"),
    [("LFM2-1.2B", "0.156"), ("Bamba-9B-v2", "119"), ("Nemotron-3-Nano-30B-A3B", "47.6")],
)
def test_given_model_with_recurrent_layers_is_described_with_its_states_and_limits(
    name: str, states: str, tmp_path: Path
) -> None:
    found = doctor.given_model(str(folder(tmp_path / "m", {**WHOLE, "config.json": PUBLISHED[name]})))
    assert found.state != "missing"
    limits = "one process a worker, no drafts by heads"
    assert f"2 x {states} MiB of recurrent states a sequence, {limits}" in found.text
    assert "int8 on CPUs" not in found.text


def test_given_model_that_is_none_is_missing(tmp_path: Path) -> None:
    found = doctor.given_model(str(tmp_path))
    assert (found.state, "is empty" in found.text) == ("missing", True)


def test_doctor_names_the_file_that_encodes_a_models_images_and_why_another_does_not(tmp_path: Path) -> None:
    made = tmp_path / "folder"
    made.mkdir()
    pair = mmproj_twins.write("llava", vision_models.write("llava", made), tmp_path)
    other = mmproj_twins.write_mmproj(tmp_path / "other-mmproj.gguf", {"clip.has_vision_encoder": False}, {})
    found = doctor.given_model(str(pair.text))
    assert f"encoded by {pair.mmproj.name}" in found.text
    assert f"{other.name} beside it is not taken: {other.name} has no encoder of images" in found.text
    refused = doctor.given_model(str(pair.text), other)
    assert refused.state == "missing"
    assert f"--mmproj: {other.name} has no encoder of images" in refused.text
