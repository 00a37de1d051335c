"""The shell commands that the documents show, one entry a command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """`words` as a shell splits them, without comment; `text` is how the page has it."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands_of(page: Path, root: Path) -> list[Command]:
    """Return the commands of the `sh` blocks of a page, lines joined as a shell joins them."""
    found: list[Command] = []
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        pending = ""
        for line in block.splitlines():
            pending = f"{pending}\n{line}" if pending else line
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quotation goes on in the next line
                continue
            if pending.rstrip().endswith("\\"):
                pending = pending.rstrip()[:-1]
                continue
            if words:
                found.append(Command(str(page.relative_to(root)), pending.strip()))
            pending = ""
        assert not pending, f"{page}: a command has no end: {pending}"
    return found
