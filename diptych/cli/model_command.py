"""`diptych model`: the models of a running gateway, and the names that stand for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.address_options import ADMIN_PORT, AdminAddress, utf8

model = typer.Typer(name="model", no_args_is_help=True, add_completion=False)
_ADDRESS = f"127.0.0.1:{ADMIN_PORT}"
_UpPort = Annotated[
    int | None,
    typer.Option(
        "--grpc-port",
        help="Public port of a `diptych up` of this machine; default: that before a loopback admin port.",
    ),
]


@model.callback()
def _model() -> None:
    """Load, replace, unload and list the models of a running system, and share names between them."""


@model.command("load")
def load(
    name: Annotated[str, typer.Argument(callback=utf8, help="What requests have as `model`.")],
    path: Annotated[Path, typer.Argument(help="GGUF file or Hugging Face folder.")],
    address: AdminAddress = _ADDRESS,
    grpc_port: _UpPort = None,
) -> None:
    """Serve a model; of a name that is served, replace its model once the new one has workers.

    A `diptych up` of this machine starts them; workers elsewhere are started by themselves.
    """
    from diptych.cli.model_commands import load_model

    raise typer.Exit(load_model(address, grpc_port, name, path))


@model.command("unload")
def unload(
    name: Annotated[str, typer.Argument(callback=utf8, help="As `diptych model list` names it.")],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for its requests.")] = 300.0,
    address: AdminAddress = _ADDRESS,
    grpc_port: _UpPort = None,
) -> None:
    """Refuse new requests for a model, and let the running ones end."""
    from diptych.cli.model_commands import unload_model

    raise typer.Exit(unload_model(address, grpc_port, name, timeout))


@model.command("alias")
def alias(
    name: Annotated[str, typer.Argument(callback=utf8, help="What requests have as `model`.")],
    shares: Annotated[
        list[str] | None,
        typer.Argument(callback=utf8, help="MODEL or MODEL:WEIGHT, such as v1:90 v2:10; none: forget it."),
    ] = None,
    address: AdminAddress = _ADDRESS,
    grpc_port: _UpPort = None,
) -> None:
    """Let a name stand for a model, or for shares of several; or for none any more."""
    from diptych.cli.model_commands import set_alias

    raise typer.Exit(set_alias(address, grpc_port, name, shares or []))


@model.command("list")
def listed(address: AdminAddress = _ADDRESS) -> None:
    """List the models: digest, requests, whether they have workers; then aliases with their shares."""
    from diptych.cli.model_commands import list_models

    raise typer.Exit(list_models(address))
