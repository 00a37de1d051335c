"""Runs a supervisor over two small programs and Valkey, prints their pids as JSON, waits to be killed."""

import asyncio
import json

from diptych.cli.supervisor import Supervisor
from diptych.cli.valkey import start_valkey
from tests.diptych.cli.specs import program_spec


async def main() -> None:
    supervisor = Supervisor(lambda event: None)
    await start_valkey(supervisor)
    await supervisor.start([program_spec("one"), program_spec("two")])
    print(json.dumps([one.pid for one in supervisor.running()]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
