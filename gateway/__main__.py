"""Program ``python -m gateway``: parse the settings, serve until a signal, drain."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from diptych.runtime.process import announce_ready, exit_on_sigterm, leave, run_program
from gateway.config import GatewaySettings
from gateway.program import Gateway
from gateway.served_models.loading import load_models


def main(argv: Sequence[str]) -> int:
    """Run a gateway with the flags in ``argv``; return the exit status."""
    exit_on_sigterm()
    settings = GatewaySettings.from_argv(argv)

    async def serve(stop: asyncio.Event) -> int:
        gateway = Gateway(settings, load_models(settings))
        try:
            await gateway.start()
            ports = {
                "grpc_port": gateway.grpc_port,
                "http_port": gateway.http_port,
                "admin_port": gateway.admin_port,
            }
            announce_ready(settings, ports)
            await stop.wait()
            await gateway.drain()
        finally:
            await gateway.close()
        return 0

    return run_program(serve, settings)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
