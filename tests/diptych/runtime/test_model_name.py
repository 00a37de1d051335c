"""Names of a served model from its path: the real folder's, whatever way leads there."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.runtime.model_name import NamelessModel, model_names
from diptych.runtime.settings import resolve_model


def named(model: str) -> tuple[str, tuple[str, ...]]:
    return tuple(model_names(resolve_model(model)))  # type: ignore[return-value]


def test_relative_paths_give_the_folders_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen3-0.6B" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "Qwen3-0.6B")
    for model in (".", "./", "./.", "../Qwen3-0.6B", "../Qwen3-0.6B/", "inner/..", "inner/../"):
        assert named(model) == ("Qwen3-0.6B", ())
    monkeypatch.chdir("inner")
    assert named("..") == ("Qwen3-0.6B", ())


@pytest.mark.parametrize(
    ("folder", "name", "aliases"),
    [
        ("models--Qwen--Qwen3-0.6B", "Qwen3-0.6B", ("Qwen/Qwen3-0.6B",)),
        ("models--gpt2", "gpt2", ()),
        ("models--org--a--b", "a--b", ("org/a--b",)),
    ],
)
def test_snapshot_of_the_cache_is_called_as_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, name: str, aliases: tuple[str, ...]
) -> None:
    snapshot = tmp_path / folder / "snapshots" / "8f14e45fceea167a5a36dedd4bea2543"
    snapshot.mkdir(parents=True)
    assert named(str(snapshot)) == named(f"{snapshot}/") == (name, aliases)
    monkeypatch.chdir(snapshot)
    assert named(".") == (name, aliases)
    (tmp_path / "current").symlink_to(snapshot)
    assert named(str(tmp_path / "current")) == (name, (*aliases, "current"))


def test_gguf_file_in_the_cache_has_its_own_name_and_not_its_digest(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--Qwen3-GGUF"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "5e884898da").write_bytes(b"GGUF")
    link = repository / "snapshots" / "abc" / "Qwen3-Q4_K_M.gguf"
    link.symlink_to("../../blobs/5e884898da")
    assert named(str(link)) == ("Qwen3", ("Qwen3-Q4_K_M",))


def test_links_give_the_name_of_what_they_lead_to_and_their_own_as_an_alias(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-Q8_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "model.gguf").symlink_to("Qwen3-Q8_0.gguf")
    assert named(str(tmp_path / "model.gguf")) == ("Qwen3", ("Qwen3-Q8_0", "model"))
    (tmp_path / "Llama-3.2-1B").mkdir()
    (tmp_path / "latest").symlink_to("Llama-3.2-1B")
    assert named(str(tmp_path / "latest")) == ("Llama-3.2-1B", ("latest",))


def test_path_without_a_name_is_refused() -> None:
    with pytest.raises(NamelessModel, match="/ gives the model no name: choose one with --model-name"):
        model_names(resolve_model("/"))
    assert model_names(Path("/"), "mine") == ("mine", ())
