"""The digest of an adapter's content, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.runtime.adapter_files import BadAdapter, read_adapter
from tests.gateway.adapters.folders import write


def test_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    one = read_adapter(write(tmp_path / "one"))
    (write(tmp_path / "two") / "README.md").write_text("the same elsewhere")
    assert read_adapter(tmp_path / "two").digest == one.digest
    assert len(one.digest) == 32


@pytest.mark.parametrize("change", [{"content": "b"}, {"rank": 16}, {"lora_alpha": 1}])
def test_any_other_byte_is_another_digest(tmp_path: Path, change: dict[str, object]) -> None:
    one = read_adapter(write(tmp_path / "one"))
    assert read_adapter(write(tmp_path / "two", **change)).digest != one.digest  # type: ignore[arg-type]


def test_bytes_that_move_between_the_files_are_another_digest(tmp_path: Path) -> None:
    digests = set()
    for name, config, weights in (("one", "{}", " {}"), ("two", "{} ", "{}")):
        folder = write(tmp_path / name)
        (folder / "adapter_config.json").write_text(config.replace("{}", '{"r": 8}'))
        (folder / "adapter_model.safetensors").write_text(weights)
        digests.add(read_adapter(folder).digest)
    assert len(digests) == 2


def test_rank_is_the_largest_of_the_modules(tmp_path: Path) -> None:
    assert read_adapter(write(tmp_path, rank=4, rank_pattern={"q_proj": 32, "v_proj": 2})).rank == 32


def test_a_gguf_file_says_no_rank(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert read_adapter(tmp_path / "a.gguf").rank is None


def test_what_is_no_adapter_is_refused_in_words(tmp_path: Path) -> None:
    def why(path: Path) -> str:
        with pytest.raises(BadAdapter) as caught:
            read_adapter(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "no adapter at" in why(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("x")
    assert "neither a folder" in why(tmp_path / "file.txt")
    (tmp_path / "empty").mkdir()
    assert "has no adapter_config.json" in why(tmp_path / "empty")
    assert "integers above 0" in why(write(tmp_path / "rank", rank="8"))
    assert "integers above 0" in why(write(tmp_path / "none", rank=0))
    assert "integers above 0" in why(write(tmp_path / "pattern", rank_pattern=[8]))
    folder = write(tmp_path / "json")
    (folder / "adapter_config.json").write_text("{")
    assert "is not JSON" in why(folder)
    (folder / "adapter_config.json").write_text("[]")
    assert "no JSON object" in why(folder)
    folder = write(tmp_path / "pickle")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "pickle" in why(folder)
    (folder / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in why(folder)
