"""Entry point of the `diptych` command and of `python -m diptych`."""

import os
import sys
from pathlib import Path

from diptych.runtime.python_module import (
    USAGE_ERROR,
    explain_import_failure,
    find_packages_here,
    module_command,
    tree_root,
)


def main() -> None:
    """Run the command line; without the packages of the extra `server`, name it and exit with status 2.

    With `DIPTYCH_TREE` the process is replaced by the command of that tree.
    """
    if tree_root() != Path(__file__).resolve().parents[1]:
        os.execv(sys.executable, [*module_command("diptych"), *sys.argv[1:]])
    find_packages_here()
    try:
        from diptych.cli.app import main as run
    except (ImportError, AttributeError) as error:
        sentence = explain_import_failure(error)
        if sentence is None:
            raise
        print(f"diptych: {sentence}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    run()


if __name__ == "__main__":
    main()
