import json
from collections import Counter
from pathlib import Path

import pytest

from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.prompts_file import PromptsFile, read_prompts
from diptych.bench.request import BenchRequest


def test_reads_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("What is it?\n\n  Who are you?\n")
    assert read_prompts(path, 9) == (BenchRequest("What is it?", 9), BenchRequest("  Who are you?", 9))


def test_reads_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi", "output_len": 3}\n{"token_ids": [5, 6]}\n')
    assert read_prompts(path, 9) == (BenchRequest("Hi", 3), BenchRequest((5, 6), 9))


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", "{}", "null", '{"prompt": "a", "token_ids": [1]}', '{"prompt": 5}', '{"token_ids": []}',
     '{"prompt": "a", "output_len": 0}', '{"token_ids": ["x"]}', '{"token_ids": [-1]}',
     '{"token_ids": [4294967296]}', '{"token_ids": [1.5]}', '{"token_ids": "12"}', '{"token_ids": 12}',
     '{"prompt": "a", "output_len": null}', '{"prompt": "a", "output_len": 1e999}', r'{"prompt": "a\ud83d"}'],
)  # fmt: skip
def test_says_which_line_is_wrong(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(BadDataset, match="line 3"):
        read_prompts(path, 9)


def test_says_which_field_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine", "output_len": "many"}')
    with pytest.raises(BadDataset, match=r"line 1: 'output_len' must be a whole number, not 'many'"):
        read_prompts(path, 9)


@pytest.mark.parametrize("sign", ["\u2028", "\u0085", "\f"])
def test_only_a_line_end_ends_a_prompt(sign: str, tmp_path: Path) -> None:
    said = f"one{sign}two"
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text(f"{said}\r\nthree", encoding="utf-8", newline="")
    assert read_prompts(plain, 9) == (BenchRequest(said, 9), BenchRequest("three", 9))
    if sign != "\f":  # JSON has control characters escaped
        lines.write_text(json.dumps({"prompt": said}, ensure_ascii=False), encoding="utf-8")
        assert read_prompts(lines, 9) == (BenchRequest(said, 9),)


def test_refuses_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n")
    with pytest.raises(BadDataset, match="no prompts"):
        read_prompts(path, 9)


def test_asks_all_before_any_comes_again() -> None:
    prompts = tuple(BenchRequest(str(number), 1) for number in range(5))
    requests = PromptsFile(prompts).requests(13, 3)
    assert sorted(Counter(requests).values()) == [2, 2, 3, 3, 3]
    assert set(requests[:5]) == set(requests[5:10]) == set(prompts)
    assert requests != PromptsFile(prompts).requests(13, 4)
