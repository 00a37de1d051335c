"""`diptych lora load`, `unload` and `list`: the adapters of a running system."""

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from diptych.cli.admin_commands import FILE_WIDTH, call_admin
from diptych.client.credentials import Metadata
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc

LOAD_S = 300.0  # files of gigabytes, on every worker
_LIST_S = 10.0


def load_adapter(address: str, name: str, path: Path, *, replace: bool, model: str = "") -> int:
    """Load an adapter. Exit status 1 when it is refused, or the gateway cannot be asked."""

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        files = str(path.expanduser().absolute())
        request = pb.LoadAdapterRequest(name=name, path=files, replace=replace, model=model)
        loaded = stub.LoadAdapter(request, timeout=LOAD_S, metadata=metadata).adapter
        print(
            f"{loaded.name} serves {loaded.digest[:12]} on {', '.join(loaded.workers) or 'no worker so far'}"
        )

    return call_admin(address, ask)


def unload_adapter(address: str, name: str, timeout_s: float) -> int:
    """Unload an adapter and wait for its requests. Exit status 1 when there is none, or some still run."""

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=timeout_s, metadata=metadata)
        print(f"{name} is unloaded")

    return call_admin(address, ask)


def list_adapters(address: str) -> int:
    """Print a table of the adapters. Exit status 1 when the gateway cannot be asked."""

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        answer = stub.ListAdapters(pb.ListAdaptersRequest(), timeout=_LIST_S, metadata=metadata)
        width = None if sys.stdout.isatty() else FILE_WIDTH
        console = Console(width=width)
        console.print(adapter_table(answer.adapters))
        for one in answer.adapters:
            for refusal in one.refusals:
                console.print(f"{one.name}: {refusal}", highlight=False, markup=False, soft_wrap=True)

    return call_admin(address, ask)


def adapter_table(adapters: Iterable[pb.Adapter]) -> Table:
    """Return a table with a row an adapter; its name stays whole, for `unload` asks for it."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("adapter", "digest", "rank", "state", "running"):
        table.add_column(column, no_wrap=True)
    for column in ("workers", "path"):
        table.add_column(column, overflow="fold")
    for one in adapters:
        table.add_row(
            one.name,
            one.digest[:12],
            str(one.rank or ""),
            "[yellow]unloading[/]" if one.draining else "[green]served[/]",
            str(one.running),
            ", ".join(one.workers),
            one.path,
        )
    return table
