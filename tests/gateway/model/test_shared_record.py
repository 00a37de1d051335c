"""Records of models and aliases that gateways share: their forms, their order, and what is to be done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.model.aliases import Share
from gateway.model.shared_record import (
    MAX_OVER,
    BadRecord,
    Kind,
    SharedRecord,
    differences,
    parse_record,
    parse_records,
)

MODEL = SharedRecord(Kind.MODEL, "chat-v3", "/models/c", "3" * 64, over=("1" * 64,))
ALIAS = SharedRecord(Kind.ALIAS, "chat", shares=(Share("one", 90), Share("two", 10)))
GONE = SharedRecord(Kind.MODEL, "chat-v1", over=("1" * 64,))


@pytest.mark.parametrize("record", [MODEL, ALIAS, GONE])
def test_record_is_read_as_it_was_written(record: SharedRecord) -> None:
    assert parse_record(record.key, json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model:-", {}),
        ("adapter:one", {}),
        ("model", {}),
        ("model:one", {"digest": "1"}),
        ("model:one", {"path": "/m"}),
        ("model:one", {"path": 1, "digest": "1"}),
        ("model:one", {"shares": [["two", 1]]}),
        ("alias:one", {"path": "/m", "digest": "1"}),
        ("alias:one", {"shares": [["two"]]}),
        ("alias:one", {"shares": [["two", "1"]]}),
        ("alias:one", {"shares": [["one", 1]]}),
        ("alias:one", {"shares": 3}),
        ("alias:one", {"over": "x"}),
        ("alias:one", {"over": [1]}),
    ],
)
def test_what_no_gateway_wrote_is_no_record(key: str, value: dict[str, Any]) -> None:
    with pytest.raises(BadRecord):
        parse_record(key, value)
    assert parse_records({key: value, MODEL.key: MODEL.to_json()}) == {MODEL.key: MODEL}


def test_record_knows_what_it_came_after() -> None:
    first = SharedRecord(Kind.MODEL, "one", "/b", "b").after(None, "a")
    second = SharedRecord(Kind.MODEL, "one", "/c", "c").after(first, "x")
    gone = SharedRecord(Kind.MODEL, "one").after(second, None)
    assert (first.over, second.over, gone.over) == (("a",), ("a", "b", "x"), ("a", "b", "x", "c"))
    back = SharedRecord(Kind.MODEL, "one", "/a", "a").after(gone, "a")
    assert back.over == ("b", "x", "c")
    for number in range(2 * MAX_OVER):
        back = SharedRecord(Kind.MODEL, "one", "/n", str(number)).after(back, None)
    assert back.over == tuple(str(number) for number in range(MAX_OVER - 1, 2 * MAX_OVER - 1))


def test_record_counts_over_the_settings_it_came_after_and_no_others() -> None:
    record = SharedRecord(Kind.MODEL, "one", "/b", "b", over=("a",))
    assert [record.counts_over(one) for one in (None, "a", "b", "c")] == [True, True, True, False]


def test_differences_come_in_an_order_in_which_they_can_be_followed() -> None:
    """An alias goes before its name becomes a model's, and a model goes after its aliases."""
    new_alias = SharedRecord(Kind.ALIAS, "best", shares=(Share("chat-v3", 1),))
    freed = SharedRecord(Kind.ALIAS, "old")
    records = [GONE, new_alias, MODEL, freed, ALIAS]
    served = {"model:chat-v1": "1" * 64, "model:one": "x", "model:two": "y"}
    served |= {"alias:chat": "one:90,two:10", "alias:old": "one:1"}
    assert differences(records, served) == [freed, MODEL, new_alias, GONE]
    followed = {"model:chat-v3": "3" * 64, "model:one": "x", "model:two": "y"}
    shares = {"alias:chat": "one:90,two:10", "alias:best": "chat-v3:1"}
    assert differences(records, followed | shares) == []
    assert differences([ALIAS], followed | {"alias:chat": "one:90,two:11"}) == [ALIAS]
