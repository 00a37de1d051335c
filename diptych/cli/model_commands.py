"""`diptych model load`, `unload`, `alias` and `list`: calls of a gateway's admin port."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from diptych.cli.admin_commands import FILE_WIDTH, call_admin
from diptych.cli.control import NoSystem, ask_system
from diptych.client.credentials import Metadata
from diptych.runtime.bind_address import is_loopback
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from gateway.model.aliases import BadAlias, parse_aliases

Ask = Callable[[admin_pb2_grpc.AdminServiceStub, Metadata], None]
LOAD_S = 120.0
LEAVE_S = 300.0
_LIST_S = 10.0
_LOOK_S = 0.2


def load_model(address: str, grpc_port: int | None, name: str, path: Path) -> int:
    """Load a model. Exit status 1 when it is refused, or the gateway cannot be asked."""
    files = str(path.expanduser().absolute())
    port = _up_port(address, grpc_port)
    if port is not None and (status := call_admin(address, _may_ask)):
        return status
    try:
        if port is not None and not ask_system(port, {"load_model": [name, files]}, print):
            return 1
    except NoSystem:
        port = None

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        request = pb.LoadModelRequest(name=name, path=files)
        loaded = stub.LoadModel(request, timeout=LOAD_S, metadata=metadata).model
        state = "ready" if loaded.ready else loaded.detail
        print(f"{loaded.name} serves {loaded.digest[:12]}: {state}")

    return _ask_and_keep(address, port, ask)


def unload_model(address: str, grpc_port: int | None, name: str, timeout_s: float) -> int:
    """Unload a model and wait for its requests. Exit status 1 when there is none, or some still run."""

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        stub.UnloadModel(pb.UnloadModelRequest(name=name), timeout=timeout_s, metadata=metadata)
        print(f"{name} is unloaded")

    return _ask_and_keep(address, _up_port(address, grpc_port), ask)


def set_alias(address: str, grpc_port: int | None, name: str, shares: Sequence[str]) -> int:
    """Let a name stand for models, or for nothing. Exit status 1 when that is refused."""
    alias = pb.ModelAlias(name=name)
    try:
        for one in parse_aliases(f"{name}={','.join(shares)}") if shares else ():
            alias.shares.extend(pb.ModelShare(model=share.model, weight=share.weight) for share in one.shares)
    except BadAlias as error:
        print(f"diptych: {error}", file=sys.stderr)
        return 1

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        stub.SetModelAlias(pb.SetModelAliasRequest(alias=alias), timeout=_LIST_S, metadata=metadata)
        print(alias_line(alias) if shares else f"{name} stands for nothing any more")

    return _ask_and_keep(address, _up_port(address, grpc_port), ask)


def _may_ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
    """Ask for nothing new: workers are started for a gateway that takes this caller's orders."""
    stub.ListServedModels(pb.ListServedModelsRequest(), timeout=_LIST_S, metadata=metadata)


def _up_port(address: str, grpc_port: int | None) -> int | None:
    """Return the public port of the `diptych up` to which the gateway may belong; None: it is elsewhere."""
    if grpc_port is not None:
        return grpc_port
    host, _, port = address.rpartition(":")
    return int(port) - 1 if is_loopback(host) and port.isdecimal() and int(port) > 1 else None


def _ask_and_keep(address: str, port: int | None, ask: Ask) -> int:
    """Call the gateway; then let its `diptych up`, if there is one, run the workers of what it serves."""
    served = pb.ListServedModelsResponse()

    def ask_both(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        try:
            ask(stub, metadata)
        finally:
            if port is not None:
                served.CopyFrom(_settled(stub, metadata))

    status = call_admin(address, ask_both)
    models = [[one.name, one.path] for one in served.models]
    if port is None or not models:
        return status
    aliases = ",".join(f"{one.name}={','.join(map(_share, one.shares))}" for one in served.aliases)
    try:
        kept = ask_system(port, {"keep_models": {"models": models, "aliases": aliases}}, print)
    except NoSystem:  # the gateway was started by itself
        return status
    return status if kept else 1


def _settled(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> pb.ListServedModelsResponse:
    """Return what is served once no request runs on a model that was replaced; at the latest in `LEAVE_S`."""
    deadline = time.monotonic() + LEAVE_S
    while True:
        request = pb.ListServedModelsRequest()
        served: pb.ListServedModelsResponse = stub.ListServedModels(
            request, timeout=_LIST_S, metadata=metadata
        )
        if not any(one.leaving for one in served.models) or time.monotonic() > deadline:
            return served
        time.sleep(_LOOK_S)


def _share(share: pb.ModelShare) -> str:
    return f"{share.model}:{share.weight}"


def list_models(address: str) -> int:
    """Print a table of the models, and aliases. Exit status 1 when the gateway cannot be asked."""

    def ask(stub: admin_pb2_grpc.AdminServiceStub, metadata: Metadata) -> None:
        answer = stub.ListServedModels(pb.ListServedModelsRequest(), timeout=_LIST_S, metadata=metadata)
        console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        console.print(model_table(answer.models))
        for alias in answer.aliases:
            console.print(alias_line(alias), highlight=False, markup=False, soft_wrap=True)
        for problem in answer.problems:
            console.print(f"not as other gateways: {problem}", highlight=False, markup=False, soft_wrap=True)

    return call_admin(address, ask)


def model_table(models: Iterable[pb.ServedModel]) -> Table:
    """Return a table with a row a model."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("model", "digest", "state", "running", "path"):
        table.add_column(column, overflow="fold")
    for one in models:
        state = "leaving" if one.leaving else "ready" if one.ready else one.detail
        table.add_row(one.name, one.digest[:12], state, str(one.running), one.path)
    return table


def alias_line(alias: pb.ModelAlias) -> str:
    """Return what a name stands for, in a line."""
    total = sum(share.weight for share in alias.shares)
    shares = (f"{share.model} {share.weight / total:.0%}" for share in alias.shares)
    return f"{alias.name} stands for {', '.join(shares)}"
