"""The clients' results and their table."""

import json

from tests.clients.recording_proxy import Exchange
from tests.clients.results import (
    FAILED,
    NOT_OFFERED,
    OK,
    PATHS,
    REFUSED,
    ClientResults,
    PathResult,
    complete,
    explain,
    markdown_table,
    read_result,
)

REFUSAL = Exchange("POST /v1/chat/completions", b"{}", 400, b'{"error": {"message": "tools: none here"}}')
ANSWER = Exchange("POST /v1/chat/completions", b"{}", 200, b"{}")


def test_result_is_read_from_a_line_of_json_only() -> None:
    line = json.dumps({"path": "plain", "result": OK, "remark": ""})
    assert read_result(line + "\n") == PathResult("plain", OK)
    assert read_result("a client's own output") is None
    assert read_result('{"path": "plain"}') is None
    assert read_result("[1]") is None


def test_missing_path_is_failed_with_the_drivers_ending() -> None:
    found = complete([PathResult("cancel", OK), PathResult("plain", OK)], "over the time limit")
    assert [one.path for one in found] == list(PATHS)
    assert {one.path for one in found if one.result == OK} == {"plain", "cancel"}
    assert all(one.remark == "over the time limit" for one in found if one.result == FAILED)


def test_refusal_in_the_exchanges_explains_a_failure() -> None:
    failed = PathResult("tools", FAILED, "LMInvalidRequestError: no")
    assert explain(failed, [ANSWER, REFUSAL]) == PathResult(
        "tools", REFUSED, "LMInvalidRequestError: tools: none here"
    )
    assert explain(failed, [ANSWER]) == failed


def test_refusal_that_the_path_expects_leaves_its_outcome() -> None:
    for one in (PathResult("overflow", OK), PathResult("overflow", FAILED, "AssertionError: no overflow")):
        assert explain(one, [REFUSAL]) == one


def test_table_has_a_row_per_client_and_a_line_per_reason() -> None:
    results = [
        PathResult("plain", OK),
        PathResult("tools", NOT_OFFERED, "no tools"),
        PathResult("cancel", FAILED, "a|b"),
    ]
    rows = markdown_table([ClientResults("one", "one 1.0", complete(results, "ended"))]).splitlines()
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|") == len(PATHS) + 3
    assert rows[2].startswith("| one | one 1.0 | ok | **failed** |")
    assert rows[2].endswith("| **failed** |")
    assert "| – |" in rows[2]
    assert "- one, tools: no tools" in rows
    assert "- one, cancel: a¦b" in rows
