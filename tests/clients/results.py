"""Results of the clients' paths, and the Markdown table of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

PATHS = (
    "plain",
    "streamed",
    "structured",
    "tools",
    "tools (template)",
    "second turn",
    "overflow",
    "cancel",
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

    @property
    def failed(self) -> list[PathResult]:
        """The paths that did not go as they should."""
        return [one for one in self.results if one.result in (FAILED, REFUSED)]


def read_results(output: str, ending: str) -> tuple[PathResult, ...]:
    """Return the outcome of every path of PATHS from the JSON lines of a driver.

    A path that the driver did not report is failed, with `ending`, which says how the driver ended.
    """
    found = {}
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and set(value) == {"path", "result", "remark"}:
            found[value["path"]] = PathResult(**value)
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
