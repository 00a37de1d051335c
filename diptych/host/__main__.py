"""`python -m diptych.host`: a prefill and a decode worker in one process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from diptych.host.config import HostSettings, read_settings
from diptych.runtime.process import exit_on_sigterm, importing, leave, run_program, set_up_logging
from diptych.runtime.settings import CANNOT_START, StartupError


def main(argv: Sequence[str]) -> int:
    """Run with the flags `argv` (without the program's name) until a signal; return the exit status."""
    exit_on_sigterm()
    try:
        settings = read_settings(argv)
    except StartupError as error:
        set_up_logging(HostSettings())
        logging.getLogger(__name__).error(f"{CANNOT_START}%s", error)
        return 1

    # Imported after the flags are read: a wrong flag needs no torch.
    with importing():
        from diptych.host.program import serve

    return run_program(lambda stop: serve(settings, stop), settings.own)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
