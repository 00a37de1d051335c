import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.sharegpt import read_sharegpt
from diptych.bench.request import BenchRequest


def written(folder: Path, *conversations: list[tuple[str, str]]) -> Path:
    path = folder / "sharegpt.json"
    records = [
        {"conversations": [{"from": who, "value": said} for who, said in one]} for one in conversations
    ]
    path.write_text(json.dumps(records))
    return path


def words(folder: Path) -> Path:
    """A tokenizer for which a token is a word."""
    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def test_the_first_human_turn_is_the_prompt(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [("human", "Why?"), ("gpt", "So."), ("human", "And?"), ("gpt", "No.")],
        [("gpt", "… as I said."), ("human", "Go on"), ("gpt", "Well")],
        [("human", "alone")],
        [],
    )
    assert read_sharegpt(path, 9, None) == (BenchRequest("Why?", 9), BenchRequest("Go on", 9))


def test_answers_are_as_long_as_theirs_and_outliers_are_left_out(tmp_path: Path) -> None:
    def turns(asked: int, told: int) -> list[tuple[str, str]]:
        return [("human", "a " * asked), ("gpt", "b " * told)]

    lengths = [(4, 4), (3, 9), (9, 3), (1024, 1024), (1025, 9), (9, 2039), (9, 2040)]
    path = written(tmp_path, *(turns(*one) for one in lengths))
    made = read_sharegpt(path, 5, words(tmp_path))
    assert [(len(str(one.prompt).split()), one.output_len) for one in made] == [
        (4, 4),
        (1024, 1024),
        (9, 2039),
    ]


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"prompt": "a"}\n{"prompt": "b"}', "[1]", '[{"text": "a"}]', "[]", '{"conversations": []}',
     '[{"conversations": [{"from": "human"}, {"from": "gpt"}]}]',
     '[{"conversations": [{"from": "human", "value": 5}, {"from": "gpt", "value": "a"}]}]'],
)  # fmt: skip
def test_read_refuses_a_file_that_is_no_sharegpt(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(BadDataset, match=r"x\.json[:,] "):
        read_sharegpt(path, 9, None)


def test_a_turn_that_is_not_sent_may_be_unsendable(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    turns = [("gpt", "cut off \ud83d"), ("human", "Why?"), ("gpt", "So.")]
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in turns]}]))
    assert read_sharegpt(path, 9, None) == (BenchRequest("Why?", 9),)


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ({"from": "human"}, "no 'value'"),
        ({"from": "human", "value": None}, "'value' must be text"),
        ({"from": "human", "value": "hi \ud83d"}, "'value' has half a surrogate pair at character 3"),
        ({"value": "hi"}, "no 'from'"),
    ],
)
def test_says_which_conversation_is_wrong(turn: dict[str, str | None], told: str, tmp_path: Path) -> None:
    answer = {"from": "gpt", "value": "So."}
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"conversations": one} for one in ([], [turn, answer])]))
    with pytest.raises(BadDataset, match=f"conversation 2: {told}"):
        read_sharegpt(path, 9, None)


def test_read_refuses_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    path = written(tmp_path, [("human", "Why?"), ("gpt", "So.")])
    with pytest.raises(BadDataset, match=r"nowhere\.json"):
        read_sharegpt(path, 9, tmp_path / "nowhere.json")
