"""Split GGUF files by name: any part, or the folder, gives all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.runtime.gguf_split import all_parts, first_part, missing_parts, only_split_file, whole_stem
from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_files import UnusableModel, check_model_files
from diptych.runtime.model_name import model_names
from diptych.runtime.settings import resolve_model

NAMES = [f"Model-Q4_K_M-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in NAMES]
    for number, path in enumerate(paths):
        path.write_bytes(b"GGUF" + bytes([number]) * 8)
    return paths


def test_any_part_names_all(parts: list[Path]) -> None:
    for part in parts:
        assert all_parts(part) == tuple(parts)
        assert first_part(part) == parts[0]
        assert resolve_model(str(part)) == parts[0]
    assert missing_parts(parts[1]) == ()


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-2.gguf"]
)
def test_other_names_are_whole_files(name: str) -> None:
    assert all_parts(Path(name)) == (Path(name),)


def test_folder_with_a_split_file_alone_gives_its_first_part(parts: list[Path]) -> None:
    folder = parts[0].parent
    (folder / "README.md").touch()
    assert resolve_model(str(folder)) == parts[0]
    (folder / "other.gguf").touch()
    assert resolve_model(str(folder)) == folder
    assert only_split_file([]) is None
    assert only_split_file(["a.gguf"]) is None


def test_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    for given in (parts[0], parts[2]):
        with pytest.raises(UnusableModel, match=f"1 are not in its folder: get {NAMES[1]}"):
            check_model_files(resolve_model(str(given)))
    parts[0].unlink()
    with pytest.raises(UnusableModel, match=f"get {NAMES[0]}, {NAMES[1]}"):
        check_model_files(resolve_model(str(parts[2])))


def test_digest_takes_every_part(parts: list[Path]) -> None:
    digests = {model_digest(parts[0])}
    for part in parts:
        part.write_bytes(b"changed!")
        digests.add(model_digest(parts[0]))
    assert len(digests) == 4
    assert model_digest(parts[2]) == model_digest(parts[0])


def test_name_of_the_model_has_no_number_of_a_part(parts: list[Path]) -> None:
    assert model_names(parts[0]).name == "Model"
    assert model_names(parts[0]).aliases == ("Model-Q4_K_M",)
    assert whole_stem("a.b.gguf") == "a.b"
