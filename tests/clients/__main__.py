"""`python -m tests.clients [NAME …]`: leads real clients through their main paths and prints a Markdown table.

Each client is installed into an environment of its own under build/clients when it is first asked for. The exchanges
of a path that was refused or failed are printed to stderr. Ends with status 1 if a path failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients import systems
from tests.clients.clients import CLIENTS
from tests.clients.environments import BUILD, Client
from tests.clients.recording_proxy import Exchange, recording
from tests.clients.results import FAILED, PATHS, ClientResults, PathResult, markdown_table, read_results
from tests.clients.systems import Systems

TIME_LIMIT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named clients, or all; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description="Lead clients through their paths.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--output", type=Path, help="write the table here, too")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds that a client gets")
    parser.add_argument("--verbose", action="store_true", help="print what the drivers write to stderr")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [CLIENTS[name] for name in options.names or CLIENTS]
    done = []
    BUILD.mkdir(parents=True, exist_ok=True)
    with systems.serving(BUILD) as running:
        for client in chosen:
            done.append(run_client(client, running, options.time_limit, options.verbose))
            print(markdown_table(done[-1:]), file=sys.stderr, flush=True)
    table = markdown_table(done)
    print(table)
    if options.output:
        options.output.write_text(table)
    return 1 if any(one.result == FAILED for client in done for one in client.results) else 0


def run_client(client: Client, running: Systems, time_limit_s: float, verbose: bool = False) -> ClientResults:
    """Install `client`, run its driver for at most `time_limit_s` seconds and return what it reported."""
    try:
        client.install()
    except (subprocess.SubprocessError, OSError) as error:
        told = getattr(error, "stderr", None) or str(error)
        ending = f"not installed: {told.strip()[-300:]}"
        return ClientResults(client.name, client.version, tuple(PathResult(path, FAILED, ending) for path in PATHS))
    with recording(running.root) as bundled, recording(running.tools_root) as tools:
        output, errors, ending = run_driver(
            client,
            {
                "CLIENT_ROOT": bundled.root,
                "CLIENT_TOOLS_ROOT": tools.root,
                "CLIENT_MODEL": systems.MODEL,
                "CLIENT_GRPC_ADDRESS": running.grpc_address,
            },
            time_limit_s,
        )
        results = ClientResults(client.name, client.version, read_results(output, ending))
        if verbose or any(one.remark == ending for one in results.results):
            print(errors[-8000:], file=sys.stderr)
        if results.failed:
            print_refused(client.name, bundled.exchanges + tools.exchanges)
    return results


def run_driver(client: Client, variables: dict[str, str], time_limit_s: float) -> tuple[str, str, str]:
    """Run the driver in a process group of its own; returns stdout, stderr and how it ended."""
    command, env = client.command()
    process = subprocess.Popen(
        command,
        env=env | variables,
        cwd=client.folder if client.folder.exists() else BUILD,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ending = ""
    try:
        output, errors = process.communicate(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        ending = f"over the time limit of {time_limit_s:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    return output, errors, ending or f"the driver ended with status {process.returncode}"


def print_refused(name: str, exchanges: list[Exchange]) -> None:
    """Print the exchanges that ended with an error or with none, to stderr."""
    refused = [one for one in exchanges if not 200 <= one.status < 300]
    for one in refused:
        print(f"--- {name}: {one}\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
