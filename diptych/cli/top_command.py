"""`diptych top`: a gateway's load, live in the terminal, from AdminService.WatchLoad."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator

from diptych.cli.admin_commands import call_admin
from diptych.cli.top_screen import Rates, Sample, as_json, screen_lines
from diptych.client.credentials import Metadata
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc

_TIMEOUT_S = 10.0
# ECMA-48: the alternate screen and the cursor (xterm's private modes), home, and clear to the end.
_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\033[H", "\033[K", "\033[J"


def top(address: str, interval_s: float, *, once: bool, as_lines: bool) -> int:
    """Show the load until Ctrl-C, or once. Exit status 1 when the gateway cannot be asked.

    Args:
        once: print a single sample, with rates over one interval.
        as_lines: print one line of JSON for each sample.
    """

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=_TIMEOUT_S, metadata=metadata)
        live = sys.stdout.isatty() and not once and not as_lines
        with _screen() if live else contextlib.nullcontext():
            for number, (now, rates) in enumerate(_samples(stub, metadata, interval_s)):
                if once and not number:
                    continue  # the second one has rates
                if as_lines:
                    print(json.dumps(as_json(info, now, rates)), flush=True)
                elif live:
                    _draw(info, now, rates)
                else:
                    width = 10_000 if not sys.stdout.isatty() else shutil.get_terminal_size().columns
                    print("\n".join(screen_lines(info, now, rates, width)), flush=True)
                if once:
                    return

    try:
        return call_admin(address, ask)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _samples(
    stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata, interval_s: float
) -> Iterator[tuple[Sample, Rates]]:
    request = pb.WatchLoadRequest()
    request.interval.FromNanoseconds(round(interval_s * 1e9))
    before: Sample | None = None
    stream = stub.WatchLoad(request, metadata=metadata)
    try:
        for load in stream:
            now = Sample(time.monotonic(), load)
            yield now, Rates.between(before, now)
            before = now
    finally:
        stream.cancel()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Use the alternate screen, so that the terminal is afterwards as it was."""
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _draw(info: pb.GetServerInfoResponse, now: Sample, rates: Rates) -> None:
    width, height = shutil.get_terminal_size()
    lines = screen_lines(info, now, rates, width, height - 1)[: height - 1]
    text = "".join(f"{line}{_CLEAR_LINE}\r\n" for line in (*lines, "Ctrl-C ends"))
    sys.stdout.write(f"{_HOME}{text[:-2]}{_CLEAR_REST}")
    sys.stdout.flush()
