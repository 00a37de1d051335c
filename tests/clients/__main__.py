"""`python -m tests.clients [NAME …]`: leads real clients along their main paths and prints a Markdown table.

Each client is installed into an environment of its own under build/clients when it is first asked for. The
exchanges of a path that was refused or failed are printed to stderr. Ends with status 1 if a path failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.clients import systems
from tests.clients.clients import CLIENTS
from tests.clients.environments import BUILD, Client
from tests.clients.recording_proxy import Exchange, RecordingProxy, recording
from tests.clients.results import (
    FAILED,
    REFUSED,
    ClientResults,
    PathResult,
    complete,
    explain,
    markdown_table,
    read_result,
)
from tests.clients.systems import Systems

TIME_LIMIT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named clients, or all; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description="Lead clients through their paths."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--output", type=Path, help="write the table here, too")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds that a client gets")
    parser.add_argument("--verbose", action="store_true", help="print what the drivers write to stderr")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [CLIENTS[name] for name in options.names or CLIENTS]
    done = []
    with systems.serving(BUILD) as running:
        for client in chosen:
            done.append(run_client(client, running, options.time_limit, options.verbose))
            print(f"{client.name}: {[one.result for one in done[-1].results]}", file=sys.stderr, flush=True)
    table = markdown_table(done)
    print(table)
    if options.output:
        options.output.write_text(table)
    return 1 if any(one.result == FAILED for client in done for one in client.results) else 0


def run_client(client: Client, running: Systems, time_limit_s: float, verbose: bool = False) -> ClientResults:
    """Install `client`, run its driver for at most `time_limit_s` seconds and return what it reported."""
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        client.install()
    except (subprocess.SubprocessError, OSError) as error:
        text = getattr(error, "stderr", None) or str(error)
        ending = f"not installed: {text.strip()[-300:]}"
        return ClientResults(client.name, client.version, complete([], ending))
    with (
        recording(running.root) as bundled,
        recording(running.tools_root) as tools,
        recording(running.images_root) as images,
    ):
        variables = {
            "CLIENT_ROOT": bundled.root,
            "CLIENT_TOOLS_ROOT": tools.root,
            "CLIENT_IMAGES_ROOT": images.root,
            "CLIENT_MODEL": systems.MODEL,
            "CLIENT_GRPC_ADDRESS": running.grpc_address,
        }
        results, ending = run_driver(client, variables, [bundled, tools, images], time_limit_s, verbose)
    return ClientResults(client.name, client.version, complete(results, ending))


def run_driver(
    client: Client,
    variables: dict[str, str],
    proxies: Sequence[RecordingProxy],
    time_limit_s: float,
    verbose: bool = False,
) -> tuple[list[PathResult], str]:
    """Run the driver in a process group of its own; returns what it reported, and how it ended.

    The exchanges that the `proxies` saw during a path are that path's: they explain its outcome.
    """
    command, env = client.command()
    results = []
    with subprocess.Popen(
        command,
        env=env | variables,
        cwd=client.folder if client.folder.exists() else BUILD,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if verbose else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        late = threading.Timer(time_limit_s, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        assert process.stdout is not None
        for line in process.stdout:
            if (result := read_result(line)) is None:
                continue
            exchanges = [one for proxy in proxies for one in proxy.take_exchanges()]
            results.append(explain(result, exchanges))
            if results[-1].result in (FAILED, REFUSED):
                print_exchanges(client.name, results[-1], exchanges)
        status = process.wait()
        timed_out = not late.is_alive()
        late.cancel()
        late.join()
    how = (
        f"over the time limit of {time_limit_s:.0f} s"
        if timed_out
        else f"the driver ended with status {status}"
    )
    return results, how


def print_exchanges(name: str, result: PathResult, exchanges: Sequence[Exchange]) -> None:
    """Print the exchanges of a path to stderr that ended with an error, or else all of them."""
    bad = [one for one in exchanges if not 200 <= one.status < 300]
    print(f"--- {name}, {result.path}: {result.result}: {result.remark}", file=sys.stderr)
    for one in bad or exchanges:
        print(f"{one}\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
