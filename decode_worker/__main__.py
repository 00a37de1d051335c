"""`python -m decode_worker`: one decode worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_worker.config import DecodeSettings
from diptych.runtime.process import exit_on_sigterm, importing, leave, run_program


def main(argv: Sequence[str]) -> int:
    """Run with the flags `argv` (without the program's name) until a signal; return the exit status."""
    exit_on_sigterm()
    settings = DecodeSettings.from_argv(argv)

    # Imported after the flags are read: --help and a wrong flag need no torch.
    with importing():
        from decode_worker.worker import serve

    return run_program(lambda stop: serve(settings, stop), settings)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
