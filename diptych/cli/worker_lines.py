"""`diptych workers --json` and `--watch`: each worker as a line, once or whenever one of them changes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from diptych.cli.admin_commands import call_admin, list_workers
from diptych.client.credentials import Metadata
from diptych.runtime.message_json import message_members
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc

_TIMEOUT_S = 10.0
_CHANGING = ("load", "since_heartbeat")
"""Members that change with each heartbeat: no news by themselves."""
Worker = Mapping[str, object]


def show_workers(address: str, *, as_json: bool, watch: bool) -> int:
    """List the workers, as a table or as lines of JSON. Exit status 1 when the gateway cannot be asked.

    Args:
        watch: go on, with a line for each worker that came, changed its state or went, until Ctrl-C.
    """
    if not (as_json or watch):
        return list_workers(address)

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        for line in _lines(stub, metadata, watch):
            print(json.dumps(line) if as_json else _plain(line), flush=True)

    try:
        return call_admin(address, ask)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _lines(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata, watch: bool) -> Iterator[Worker]:
    if not watch:
        answer = stub.ListWorkers(pb.ListWorkersRequest(), timeout=_TIMEOUT_S, metadata=metadata)
        yield from map(described, answer.workers)
        return
    stream = stub.WatchLoad(pb.WatchLoadRequest(), metadata=metadata)
    known: dict[str, Worker] = {}
    try:
        for load in stream:
            now = {worker.worker_id: described(worker) for worker in load.workers}
            yield from changes(known, now)
            known = now
    finally:
        stream.cancel()


def described(worker: pb.WorkerInfo) -> Worker:
    """Return a worker as JSON has it, its names those of the protocol; members at their default included."""
    return message_members(worker, short_enums=True)


def changes(before: Mapping[str, Worker], now: Mapping[str, Worker]) -> Iterable[Worker]:
    """Yield each worker that is new or changed, loads aside, and each that went, as `gone`."""
    for worker_id, worker in now.items():
        if _lasting(worker) != _lasting(before.get(worker_id, {})):
            yield worker
    for worker_id, worker in before.items():
        if worker_id not in now:
            yield {**worker, "state": "gone"}


def _lasting(worker: Worker) -> Worker:
    return {name: value for name, value in worker.items() if name not in _CHANGING}


def _plain(worker: Worker) -> str:
    detail = f": {worker['detail']}" if worker.get("detail") else ""
    return f"{worker['worker_id']} {worker['role']} {worker['state']} {worker['address']}{detail}"
