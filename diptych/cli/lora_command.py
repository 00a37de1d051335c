"""`diptych lora`: the LoRA adapters of a running system."""

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.address_options import ADMIN_PORT, AdminAddress, utf8

lora = typer.Typer(name="lora", no_args_is_help=True, add_completion=False)


@lora.callback()
def _lora() -> None:
    """Load, unload and list the LoRA adapters of a running system."""


@lora.command("load")
def lora_load(
    name: Annotated[str, typer.Argument(callback=utf8, help="What requests have as `model`.")],
    path: Annotated[
        Path, typer.Argument(help="PEFT folder or GGUF file, at the same place on every worker's host.")
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Serve it in place of another content of this name.")
    ] = False,
    model: Annotated[
        str, typer.Option(callback=utf8, help="Model that it is for; needed where several are served.")
    ] = "",
    address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
) -> None:
    """Serve a LoRA adapter, once every worker has loaded it."""
    from diptych.cli.adapter_commands import load_adapter

    raise typer.Exit(load_adapter(address, name, path, replace=replace, model=model))


@lora.command("unload")
def lora_unload(
    name: Annotated[str, typer.Argument(callback=utf8, help="As `diptych lora list` names it.")],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for its requests.")] = 300.0,
    address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
) -> None:
    """Refuse new requests for an adapter, let the running ones end, and free its memory."""
    from diptych.cli.adapter_commands import unload_adapter

    raise typer.Exit(unload_adapter(address, name, timeout))


@lora.command("list")
def lora_list(address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}") -> None:
    """List the adapters: digest, rank, requests, and the workers that have them."""
    from diptych.cli.adapter_commands import list_adapters

    raise typer.Exit(list_adapters(address))
