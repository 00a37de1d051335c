import shutil
from pathlib import Path

import pytest

from diptych.runtime.model_digest import model_digest

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model-00001-of-00002.safetensors").write_bytes(b"one")
    (path / "model-00002-of-00002.safetensors").write_bytes(b"two")
    return path


def test_the_name_does_not_count(tmp_path: Path, folder: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"GGUF" + bytes(3 * MIB))
    shutil.copy(first, second)
    assert model_digest(first) == model_digest(second)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert model_digest(folder) == model_digest(copy)


@pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 5 * MIB])
def test_size_head_and_tail_count(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    digests = set()
    contents = [bytes(size), b"x" + bytes(size - 1), bytes(size - 1) + b"y", bytes(size + 1)]
    for content in contents:
        path.write_bytes(content)
        digests.add(model_digest(path))
    assert len(digests) == len(contents)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_matrix_in_the_middle_counts(tmp_path: Path, place: float) -> None:
    """A fine tune that leaves the first and the last tensors as they are."""
    path = tmp_path / "m.safetensors"
    content = bytearray(64 * MIB)
    path.write_bytes(content)
    before = model_digest(path)
    begin, length = int(len(content) * place), len(content) // 200
    content[begin : begin + length] = b"x" * length
    path.write_bytes(content)
    assert model_digest(path) != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
def test_every_file_of_a_folder_counts(folder: Path, name: str) -> None:
    before = model_digest(folder)
    (folder / name).write_bytes(b'{"b": 2}')
    assert model_digest(folder) != before


def test_other_files_of_a_folder_do_not_count(folder: Path) -> None:
    before = model_digest(folder)
    (folder / "README.md").write_text("hello")
    assert model_digest(folder) == before


def test_what_is_missing_is_said(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        model_digest(tmp_path / "nothing.gguf")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        model_digest(folder)
