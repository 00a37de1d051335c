"""Targets file for Prometheus: the /metrics of every program, wherever Ray has put it.

    [{"targets": ["10.0.0.7:40123"], "labels": {"job": "diptych", "role": "decode", "program": "decode-0"}}]

The format is that of `file_sd_configs`, as Ray's own service discovery file has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diptych.cli.supervisor import Running
from diptych.runtime.bind_address import join_host_port


def targets(programs: Iterable[tuple[Running, str]]) -> list[dict[str, Any]]:
    """Return the content of the file: programs that serve, with the address of each."""
    return [
        {
            "targets": [join_host_port(host, int(one.announced["http_port"]))],
            "labels": {"job": "diptych", "role": one.role, "program": one.name},
        }
        for one, host in programs
        if one.announced is not None and "http_port" in one.announced
    ]


def write_targets(path: Path, programs: Iterable[tuple[Running, str]]) -> None:
    """Replace the file as a whole. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(targets(programs), indent=1))
    fresh.replace(path)


def remove_targets(path: Path) -> None:
    """Remove the file where it is."""
    path.unlink(missing_ok=True)
