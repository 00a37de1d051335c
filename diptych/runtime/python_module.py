"""How a program of ours starts another one: the same code, whatever the current directory holds."""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs a module of this installation, or of this working tree.

    `python -m` looks into the current directory first, where a clone of ours, or anything else that is called
    `diptych` or `gateway`, would pass for the package; -P keeps it from there. A working tree that is run in
    its own folder may be found nowhere else.
    """
    here = os.path.samefile(os.curdir, _ROOT)
    return (sys.executable, *(() if here else ("-P",)), "-m", module)
