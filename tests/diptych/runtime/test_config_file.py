"""Configuration files: what is read of them, and faults with their place."""

from pathlib import Path

import pytest

from diptych.runtime.config_file import BadConfigFile, read_config_file


def written(folder: Path, text: str) -> Path:
    path = folder / "serving.yaml"
    path.write_text(text)
    return path


def test_read_config_file_gives_values_as_flags_have_them(tmp_path: Path) -> None:
    text = (
        "model: bundled\nmax-queue-delay-s: 1e2\ninsecure: yes\n\ndecode:\n  # sequences\n  max_batch: '8'\n"
    )
    file = read_config_file(written(tmp_path, text))
    assert [(one.key, one.text) for one in file.common] == [
        ("model", "bundled"),
        ("max-queue-delay-s", "1e2"),
        ("insecure", "yes"),
    ]
    [entry] = file.sections["decode"]
    assert (entry.name, entry.text, entry.where) == ("max_batch", "8", f"{tmp_path}/serving.yaml:7")
    assert file.of("decode")[-1] is entry
    assert file.of("prefill") == file.common


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "decode:\n"])
def test_read_config_file_takes_an_empty_one(text: str, tmp_path: Path) -> None:
    assert read_config_file(written(tmp_path, text)).of("decode") == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model: a: b", ":1: not YAML"),
        ("- model", ":1: must be lines of KEY: VALUE"),
        ("decode: 3", ":1: must be lines of KEY: VALUE"),
        ("model: x\nmodel: y", ":2: model: set in line 1 already"),
        ("decode:\n  drain-s: 1\n  worker-shutdown-timeout: 2", ":3: worker-shutdown-timeout: set in line 2"),
        ("decode:\n  max-batch: [8]", ":2: max-batch: must be one value, not a list"),
        ("model:", ":1: model: has no value"),
        ("[a]: 1", ":1: a key must be the name of a flag"),
    ],
)
def test_read_config_file_names_the_line_of_a_fault(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfigFile) as refused:
        read_config_file(written(tmp_path, text))
    assert f"serving.yaml{fault}" in str(refused.value)


def test_read_config_file_says_why_it_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadConfigFile, match=r"cannot read .*absent\.yaml: No such file"):
        read_config_file(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(BadConfigFile, match="not UTF-8"):
        read_config_file(tmp_path / "latin.yaml")
