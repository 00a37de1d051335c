"""The images' requirement files: within pyproject.toml's bounds, by hash, and used by the Dockerfile."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.manifests import DEPLOY, ROOT

FOLDER = DEPLOY / "requirements"
FILES = {"gateway": ("gateway",), "cpu": ("gateway", "server")}
_PINNED = re.compile(r"^(?P<name>[a-z0-9._-]+)==(?P<version>[^ ;]+)(?P<rest>.*)$", re.MULTILINE)


def direct(*extras: str) -> list[Requirement]:
    """Return the project's own requirements and those of extras, without the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(t for e in extras for t in project["optional-dependencies"][e])]
    found = [Requirement(text) for text in texts]
    return [one for one in found if one.name != "diptych"]


def pinned(path: Path) -> dict[str, set[str]]:
    """Return versions by name. Fails for one without a hash."""
    found: dict[str, set[str]] = {}
    for entry in _PINNED.finditer(path.read_text().replace("\\\n", "")):
        assert "--hash=sha256:" in entry["rest"], entry["name"]
        found.setdefault(canonicalize_name(entry["name"]), set()).add(entry["version"])
    return found


@pytest.mark.parametrize("name", FILES)
def test_files_pin_every_direct_dependency_within_its_bounds(name: str) -> None:
    versions = pinned(FOLDER / f"{name}.txt")
    wanted = [one for one in direct(*FILES[name]) if one.name != "torch"]
    for requirement in wanted:
        found = versions[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in found), requirement
    assert "torch" not in versions


def test_control_a_package_without_hash_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("redis==7.0.0 \\\n    --hash=sha256:00\nrich==15.0.0\n")
    with pytest.raises(AssertionError, match="rich"):
        pinned(path)


@pytest.mark.parametrize("extra", ["gateway", "server", "gpu"])
def test_every_dependency_has_an_upper_bound(extra: str) -> None:
    unbounded = [
        one.name
        for one in direct(extra)
        if not any(bound.operator in ("<", "<=", "==") for bound in one.specifier)
    ]
    assert unbounded == []


@pytest.mark.parametrize(("target", "file"), [("gateway", "gateway"), ("cpu", "cpu"), ("gpu", "cpu")])
def test_images_install_by_hash_list_their_parts_and_are_not_root(target: str, file: str) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    build, final = (
        text.partition(f"AS {stage}\n")[2].partition("\nFROM ")[0] for stage in (f"build-{target}", target)
    )
    assert f"COPY deploy/requirements/{file}.txt /requirements.txt" in build
    assert "--require-hashes -r /requirements.txt" in build
    assert "--output-file /opt/diptych/sbom.json" in build
    assert "USER 10001" in final
