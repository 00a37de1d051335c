"""`diptych workers`, `drain`, `role`, `restart` and `flush`: commands of an operator to a running system."""

import sys
from collections.abc import Callable, Iterable, Sequence

import grpc
from rich.console import Console
from rich.table import Table

from diptych.cli.control import NoSystem, ask_restart
from diptych.client.credentials import Access, Metadata
from diptych.client.failure import read_failure
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from gateway.ports import GRPC_PORT, admin_port_beside

_TIMEOUT_S = 10.0
FILE_WIDTH = 200  # for grep: one worker, one line
_STATES = {
    pb.WORKER_STATE_READY: "[green]ready[/]",
    pb.WORKER_STATE_CONNECTING: "[yellow]connecting[/]",
    pb.WORKER_STATE_DRAINING: "[yellow]draining[/]",
    pb.WORKER_STATE_INCOMPATIBLE: "[red]incompatible[/]",
}
_NO_ADMIN_PORT = (
    "; it is no admin port: a gateway's is its gRPC port + 1 unless --admin-port says otherwise, "
    f"{admin_port_beside(GRPC_PORT, None)} by default"
)
_ROLES = {
    pb.WORKER_ROLE_PREFILL: "prefill",
    pb.WORKER_ROLE_DECODE: "decode",
    pb.WORKER_ROLE_ENCODE: "encode",
}


def list_workers(address: str) -> int:
    """Print a table of the workers. Exit status 1 when the gateway cannot be asked."""

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        answer = stub.ListWorkers(pb.ListWorkersRequest(), timeout=_TIMEOUT_S, metadata=metadata)
        width = None if sys.stdout.isatty() else FILE_WIDTH
        console = Console(width=width)
        console.print(worker_table(answer.workers))
        for reason in reasons(answer.workers):
            console.print(reason, highlight=False, markup=False, soft_wrap=True)

    return call_admin(address, ask)


def drain_worker(address: str, worker_id: str, grace_s: float | None) -> int:
    """Call the admin port for a worker.

    Exit status 1 when there is no such worker, or the gateway cannot be asked.
    """

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        request = pb.DrainWorkerRequest(worker_id=worker_id)
        if grace_s is not None:
            request.grace.FromNanoseconds(round(grace_s * 1e9))
        stub.DrainWorker(request, timeout=_TIMEOUT_S, metadata=metadata)
        print(f"{worker_id} drains")

    return call_admin(address, ask)


def change_role(address: str, worker_id: str, role: str, grace_s: float | None) -> int:
    """Order a worker to change to another role.

    Exit status 1 when there is no such worker, it keeps its role for now, or the gateway cannot be asked.
    """
    wire = next(value for value, name in _ROLES.items() if name == role)

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        request = pb.ChangeWorkerRoleRequest(worker_id=worker_id, role=wire)
        if grace_s is not None:
            request.grace.FromNanoseconds(round(grace_s * 1e9))
        answer = stub.ChangeWorkerRole(request, timeout=_TIMEOUT_S, metadata=metadata)
        then = f"drains, to be a {role} worker" if answer.changed else f"is a {role} worker already"
        print(f"{worker_id} {then}")

    return call_admin(address, ask)


def flush_prefix_cache(address: str, worker_id: str) -> int:
    """Call the admin port for a worker.

    Exit status 1 when there is no such worker, or the gateway cannot be asked.
    """

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        request = pb.FlushPrefixCacheRequest(worker_id=worker_id)
        print(
            f"{stub.FlushPrefixCache(request, timeout=_TIMEOUT_S, metadata=metadata).blocks} blocks forgotten"
        )

    return call_admin(address, ask)


def restart_processes(grpc_port: int, names: Sequence[str]) -> int:
    """Restart processes one after the other.

    Exit status 1 when no `diptych up` of this user serves at the port, or a process has no successor.
    """
    try:
        return 0 if ask_restart(grpc_port, names, print) else 1
    except NoSystem as error:
        print(f"diptych: {error}", file=sys.stderr)
        return 1


def call_admin(address: str, ask: Callable[[admin_pb2_grpc.AdminServiceStub, Metadata], None]) -> int:
    """Call `ask` with a stub of the admin port; return the exit status, with what failed on stderr."""
    try:
        access = Access.from_environment()
    except OSError as error:
        print(f"diptych: DIPTYCH_CA_FILE and its like: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"diptych: DIPTYCH_API_KEY: {error}", file=sys.stderr)
        return 1
    with access.channel(address) as channel:
        try:
            ask(admin_pb2_grpc.AdminServiceStub(channel), access.metadata)
        except grpc.RpcError as error:
            failure = read_failure(error)
            hint = _NO_ADMIN_PORT if failure.code is grpc.StatusCode.UNIMPLEMENTED else ""
            print(f"diptych: {address}: {failure}{hint}", file=sys.stderr)
            return 1
    return 0


def worker_table(workers: Iterable[pb.WorkerInfo]) -> Table:
    """Return a table with a row a worker.

    Its id stays whole on a narrow terminal, for `drain` and `flush` ask for it.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("worker", "role", "state", "running", "waiting"):
        table.add_column(column, no_wrap=True)
    workers = list(workers)
    models = len({worker.model for worker in workers}) > 1
    adapters = any(worker.load.adapters for worker in workers)
    ranks = any(worker.load.ranks for worker in workers)
    more = (*(("adapters",) if adapters else ()), *(("ranks",) if ranks else ()))
    for column in (
        *(("model",) if models else ()),
        "to prefill",
        "local prefills",
        "drafts right",
        "blocks free",
        *more,
        "address",
    ):
        table.add_column(column, overflow="fold")
    for worker in workers:
        load = worker.load
        table.add_row(
            worker.worker_id,
            _ROLES.get(worker.role, "?"),
            _STATES.get(worker.state, "?"),
            str(load.running),
            str(load.waiting),
            *((worker.model,) if models else ()),
            f"{load.waiting_tokens} tokens",
            str(load.local_prefills) if worker.role == pb.WORKER_ROLE_DECODE else "",
            f"{load.accepted_draft_tokens} of {load.drafted_tokens}" if load.drafted_tokens else "",
            f"{load.free_blocks} of {load.total_blocks}" if load.total_blocks else "",
            *((", ".join(load.adapters),) if adapters else ()),
            *((_ranks(load),) if ranks else ()),
            worker.address,
        )
    return table


def _ranks(load: pb.WorkerLoad) -> str:
    """Return the processes of a worker, stages apart: pid, memory in MiB, and what is not usual."""
    if not load.ranks:
        return ""
    each = len(load.ranks) // max(load.stages, 1)
    shown = [_rank(rank) for rank in load.ranks]
    return " | ".join(", ".join(shown[at : at + each]) for at in range(0, len(shown), each))


def _rank(rank: pb.WorkerRank) -> str:
    state = "" if rank.state in ("running", "sleeping") else f" {rank.state}"
    uses = [f"{rank.weight_bytes / 2**20:.0f} MiB"]
    if rank.kv_bytes:
        uses.append(f"KV {rank.kv_bytes / 2**20:.0f}")
    if rank.HasField("left_bytes"):
        uses.append(f"left {rank.left_bytes / 2**20:.0f}")
    return f"{rank.pid} ({', '.join(uses)}{state})"


def reasons(workers: Iterable[pb.WorkerInfo]) -> Iterable[str]:
    """Return a line for each worker that gets no new requests, or fewer, with the reason."""
    return [f"{worker.worker_id}: {worker.detail}" for worker in workers if worker.detail]
