"""deploy/podman.sh: what it runs, and that it ends what it began. A recording program is its podman."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diptych.runtime.env import unknown_variables
from diptych.runtime.http_edge import _OPERATOR
from tests.deploy.manifests import DEPLOY, leaves_within_s, settings_of
from tests.deploy.scripts import Run, dry_run, recorded_run

SCRIPT = DEPLOY / "podman.sh"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PODMAN = """#!/bin/bash
printf '%q ' podman "$@" >> {recorded}; echo >> {recorded}
[[ "$*" != *{fails}* ]] || exit 9
[ "$1" != inspect ] || echo {status}
"""


def dry(*options: str) -> Run:
    """Run the script without podman on the path."""
    return dry_run(SCRIPT, "--name", "try", *options)


def recorded(folder: Path, fails: str = "nothing-like-it", status: int = 0) -> Run:
    """Run the script with a podman that does nothing, and fails where its arguments have `fails`."""
    record = folder / "recorded"
    program = folder / "podman"
    program.write_text(
        PODMAN.format(recorded=shlex.quote(str(record)), fails=shlex.quote(fails), status=status)
    )
    program.chmod(0o755)
    return recorded_run(SCRIPT, folder, record, "--name", "try")


def left(commands: list[list[str]]) -> set[str]:
    """Return what the commands began and did not remove, as `kind name`."""
    there: set[str] = set()
    for _, *words in commands:
        if words[:2] == ["run", "--detach"]:
            there.add(f"container {words[words.index('--name') + 1]}")
        elif words[0] == "rm":
            there.discard(f"container {words[-1]}")
        elif words[0] in ("network", "volume"):
            one = f"{words[0]} {words[-1]}"
            there = there | {one} if words[1] == "create" else there - {one}
        elif words[0] == "run":
            assert words[1] == "--rm"
    return there


def started(commands: list[list[str]]) -> dict[str, list[str]]:
    """Return the words of each container that stays, by its part of the system."""
    words = [one for one in commands if one[1:3] == ["run", "--detach"]]
    return {one[one.index("--name") + 1].removeprefix("try-"): one for one in words}


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_it_builds_every_target_and_says_how_large_it_is() -> None:
    commands = dry().commands
    targets = re.findall(r"^FROM runtime AS (\w+)$", DOCKERFILE, re.MULTILINE)
    built = [one[one.index("--target") + 1] for one in commands if one[1] == "build"]
    assert sorted(built) == sorted(targets)
    tags = {one[one.index("--tag") + 1] for one in commands if one[1] == "build"}
    assert {one[-1] for one in commands if one[1:3] == ["image", "inspect"]} == tags
    assert all(one[one.index("--file") + 1] == "deploy/Dockerfile" for one in commands if one[1] == "build")


@pytest.mark.parametrize("part", ["gateway", "prefill", "decode"])
def test_programs_read_their_flags_run_without_rights_and_are_asked_at_a_port_they_have(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = started(dry().commands)[part]
    values = {a: b for a, b in pairwise(words) if a.startswith("--")}
    [uid] = set(re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE))
    assert values["--user"] == f"{uid}:{uid}"
    assert values["--cap-drop"] == "all"
    assert {"--read-only", "--init"} <= set(words)
    environment = [b for a, b in pairwise(words) if a == "--env"]
    variables = dict(one.split("=", 1) for one in environment)
    assert unknown_variables(variables) is None
    at = words.index(part)
    flags = words[at + 1 :]
    if part == "gateway":
        volume, mounted, option = values["--volume"].split(":")
        assert (volume, flags[flags.index("--batch-dir") + 1], option) == ("try", mounted, "U")
        flags[flags.index("--batch-dir") + 1] = str(tmp_path)
    else:
        assert flags[flags.index("--advertise-host") + 1] == values["--name"], "its name in the network"
    settings = settings_of(part, flags, variables, monkeypatch)
    [(port, path)] = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", values["--health-cmd"])
    assert int(port) == settings.http_port
    assert path in _OPERATOR
    [grace] = [one[one.index("--time") + 1] for one in dry().commands if one[1] == "stop" and part in one[-1]]
    if part != "gateway":  # of the gateway nothing streams any more
        assert leaves_within_s(settings) < float(grace)


def test_the_database_is_where_programs_look_for_it() -> None:
    parts = started(dry().commands)
    valkey = parts["valkey"]
    assert f"DIPTYCH_REDIS_URL=redis://{valkey[valkey.index('--name') + 1]}:6379/0" in parts["decode"]
    networks = {one[one.index("--network") + 1] for one in parts.values()}
    assert networks == {"try"}


def test_a_run_does_what_the_dry_run_says(tmp_path: Path) -> None:
    done = recorded(tmp_path)
    assert done.status == 0, done.text
    assert done.commands == dry().commands
    assert left(done.commands) == set()
    assert left(done.commands[:-1]) == {"volume try"}, "the control"


@pytest.mark.parametrize(
    ("fails", "ran"),
    [("--target cpu", 0), ("network create", 0), ("--name try-decode", 3), ("/v1/chat/completions", 4)],
)
def test_it_ends_what_it_began_when_a_step_fails(tmp_path: Path, fails: str, ran: int) -> None:
    done = recorded(tmp_path, fails)
    assert done.status == 9
    assert len(started(done.commands)) == ran
    assert left(done.commands) == set()


def test_a_program_that_ends_badly_is_a_failure(tmp_path: Path) -> None:
    done = recorded(tmp_path, status=137)
    assert (done.status, left(done.commands)) == (1, set())
    assert "gateway ended with exit code 137" in done.text
    assert ["podman", "logs", "--tail", "20", "try-gateway"] in done.commands


@pytest.mark.parametrize("wrong", [["--targets", "tpu"], ["--sizes"], ["--name", ""]])
def test_wrong_options_are_refused(wrong: list[Any]) -> None:
    done = dry(*wrong)
    assert done.status != 0
    assert wrong[0] in done.text


def test_images_stay_unless_asked_and_a_part_of_the_targets_makes_no_system() -> None:
    removed = [one[-1] for one in dry("--remove-images").commands if one[1:3] == ["image", "rm"]]
    assert removed == ["localhost/try-gateway", "localhost/try-cpu", "localhost/try-gpu"]
    assert not [one for one in dry().commands if one[1:3] == ["image", "rm"]]
    assert "A system takes gateway and cpu" in dry("--targets", "cpu").text
