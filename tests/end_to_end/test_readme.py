"""What the README shows first, and what the documents tell an operator to type, as their reader runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.access.key_file import BadKeyFile, read_key_file
from tests.end_to_end.stack import Stack

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SECURITY = ROOT / "docs" / "security.md"


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def test_the_first_python_block_answers_and_ends(bundled: Stack) -> None:
    code = blocks(README, "python")[0]
    assert '"127.0.0.1:50051"' in code
    assert code.count("max_tokens=") == 2  # a story may run to the end of the context, or into its deadline
    done = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:50051", bundled.address)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("umask", ["022", "002"])
def test_the_recipe_for_keys_makes_a_file_that_a_gateway_takes(umask: str, tmp_path: Path) -> None:
    [recipe] = [block for block in blocks(SECURITY, "sh") if "diptych key new" in block]
    diptych = f"PYTHONPATH={ROOT} {sys.executable} -m diptych"
    for _ in range(2):
        subprocess.run(
            ["sh", "-c", f"umask {umask}; {recipe.replace('diptych', diptych)}"],
            cwd=tmp_path,
            check=True,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    assert len(read_key_file(tmp_path / "keys.jsonl")) == 2
    os.chmod(tmp_path / "keys.jsonl", 0o644)
    with pytest.raises(BadKeyFile):
        read_key_file(tmp_path / "keys.jsonl")
