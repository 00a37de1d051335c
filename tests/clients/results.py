"""Results of the clients' paths, and the Markdown table of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tests.clients.recording_proxy import Exchange

PATHS = (
    "plain",
    "streamed",
    "structured",
    "tools",
    "tools (template)",
    "second turn",
    "overflow",
    "cancel",
    "images",
)
OK, REFUSED, FAILED, NOT_OFFERED = "ok", "refused", "failed", "not offered"
SHOWN = {OK: "ok", REFUSED: "refused", FAILED: "**failed**", NOT_OFFERED: "–"}


@dataclass(frozen=True)
class PathResult:
    """The outcome of one path, and a remark: why it was refused or failed, or how it ended."""

    path: str
    result: str
    remark: str = ""


@dataclass(frozen=True)
class ClientResults:
    """All that a client's driver reported; `version` names the package."""

    name: str
    version: str
    results: tuple[PathResult, ...]


def read_result(line: str) -> PathResult | None:
    """Return the outcome that a driver printed as a line of JSON, or None if the line is something else."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if isinstance(value, dict) and set(value) == {"path", "result", "remark"}:
        return PathResult(**value)
    return None


def explain(result: PathResult, exchanges: Sequence[Exchange]) -> PathResult:
    """Return `result` as refused, with the server's text, where one of its `exchanges` explains it."""
    refusals = [one for one in exchanges if 400 <= one.status < 500]
    if result.result not in (FAILED, REFUSED) or not refusals or "AssertionError" in result.remark:
        return result
    text = refusals[-1].error_message
    remark = result.remark if text in result.remark else f"{result.remark.partition(':')[0]}: {text}"
    return PathResult(result.path, REFUSED, remark)


def complete(results: Sequence[PathResult], ending: str) -> tuple[PathResult, ...]:
    """Return `results` in the order of PATHS; one that is missing is failed, with `ending` as its remark."""
    found = {one.path: one for one in results}
    return tuple(found.get(path, PathResult(path, FAILED, ending)) for path in PATHS)


def markdown_table(clients: Sequence[ClientResults]) -> str:
    """Return a table of clients and paths, and below it the remark of each path that is not ok."""
    lines = ["| client | version | " + " | ".join(PATHS) + " |", "|---" * (len(PATHS) + 2) + "|"]
    remarks = []
    for client in clients:
        cells = [SHOWN[one.result] for one in client.results]
        lines.append(f"| {client.name} | {client.version} | " + " | ".join(cells) + " |")
        remarks += [
            f"- {client.name}, {one.path}: {one.remark.replace('|', '¦')}"
            for one in client.results
            if one.result != OK and one.remark
        ]
    return "\n".join([*lines, "", *remarks]).rstrip() + "\n"
