"""`python -m tests.faults [--output FILE]`: every campaign of faults in its long form, by turns."""

from __future__ import annotations

import argparse
import sys

from tests.faults import (
    corruptions,
    disconnects,
    encoder_kills,
    group_kill,
    kill_matrix,
    next_token,
    pull_kills,
    stopped_writer,
)
from tests.faults.figures import add_output

CAMPAIGNS = (
    kill_matrix,
    pull_kills,
    next_token,
    stopped_writer,
    encoder_kills,
    group_kill,
    corruptions,
    disconnects,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    add_output(parser)
    options = parser.parse_args()
    output = [] if options.output is None else ["--output", str(options.output)]
    return max([campaign.main(output) for campaign in CAMPAIGNS])


if __name__ == "__main__":
    sys.exit(main())
