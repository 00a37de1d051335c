"""A small real program on diptych/runtime/process.py, for the supervisor's tests.

program.py MODE [flags]      MODE: serve, fail, cannot, silent, garbage, stubborn, chatty, or
once:PATH, which ends by a signal before it serves while there is a file at PATH, and removes it, or
becomes:ROLE, which serves, and at SIGHUP ends with the status by which it is started in that role
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from contextlib import closing

from prometheus_client import CollectorRegistry

from diptych.runtime.http_edge import HttpEdge
from diptych.runtime.process import announce_ready, run_program
from diptych.runtime.role_change import EXIT_STATUS
from diptych.runtime.settings import ProgramSettings, StartupError


def main() -> int:
    mode, *argv = sys.argv[1:]
    settings = ProgramSettings.from_argv(argv)

    async def serve(stop: asyncio.Event) -> int:
        if mode == "fail":
            print("the reason of the failure", file=sys.stderr)
            return 3
        if mode == "cannot":
            raise StartupError("the model is missing")
        if mode.startswith("once:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mode.removeprefix("once:"))
                os.kill(os.getpid(), signal.SIGKILL)
        if mode == "silent":
            print("loading", flush=True)
            await asyncio.sleep(3600)
        if mode == "garbage" and settings.ready_fd is not None:
            os.write(settings.ready_fd, b"neither JSON nor ready\n")
            await asyncio.sleep(3600)
        if mode == "chatty":
            print("x" * 200_000, flush=True)
            print("after the long line", flush=True)
        if mode == "stubborn":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        changes = asyncio.Event()
        if mode.startswith("becomes:"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, changes.set)
        http = await HttpEdge.start("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True)
        with closing(socket.create_server(("127.0.0.1", settings.grpc_port))) as listener:
            announce_ready(settings, {"grpc_port": listener.getsockname()[1], "http_port": http.port})
            ends = [asyncio.ensure_future(event.wait()) for event in (stop, changes)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        await http.close()
        if changes.is_set():
            return EXIT_STATUS["decode" if mode.endswith("decode") else "prefill"]
        print(f"{mode} stopped cleanly", flush=True)
        return 0

    return run_program(serve, settings)


if __name__ == "__main__":
    sys.exit(main())
