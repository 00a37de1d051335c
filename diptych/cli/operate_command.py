"""`diptych workers`, `top`, `drain`, `role`, `restart` and `flush`: commands on a running system."""

from typing import Annotated, Literal

import typer

from diptych.cli.address_options import ADMIN_PORT, AdminAddress
from gateway.ports import GRPC_PORT

WorkerRole = Literal["prefill", "decode"]


def workers(
    address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
    as_json: Annotated[bool, typer.Option("--json", help="Print each worker as a line of JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on: a line for each worker that comes, changes or goes.")
    ] = False,
) -> None:
    """List the workers of a running gateway: which are usable, why not, and how loaded they are."""
    from diptych.cli.worker_lines import show_workers

    raise typer.Exit(show_workers(address, as_json=as_json, watch=watch))


def top(
    address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
    interval: Annotated[float, typer.Option(help="Seconds between two samples.", min=0.1, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one sample and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each sample as a line of JSON.")] = False,
) -> None:
    """Show a gateway's load as it changes: workers, phases, streams, KV blocks in use, tenants."""
    from diptych.cli.top_command import top as show

    raise typer.Exit(show(address, interval, once=once, as_lines=as_json))


def drain(
    worker_id: Annotated[str, typer.Argument(help="As `diptych workers` names it.")],
    grace: Annotated[
        float | None,
        typer.Option(min=0, max=86_400, help="Seconds for what runs, a day at most; default: its own."),
    ] = None,
    address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
) -> None:
    """Let a worker take nothing new, finish or hand back what it runs, and exit."""
    from diptych.cli.admin_commands import drain_worker

    raise typer.Exit(drain_worker(address, worker_id, grace))


def role(
    worker_id: Annotated[str, typer.Argument(help="As `diptych workers` names it.")],
    becomes: Annotated[WorkerRole, typer.Argument(metavar="prefill|decode", help="Its new role.")],
    grace: Annotated[
        float | None,
        typer.Option(min=0, max=86_400, help="Seconds for what runs, a day at most; default: its own."),
    ] = None,
    address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
) -> None:
    """Let a worker finish or hand back what it runs, and start again in the other role under a new id."""
    from diptych.cli.admin_commands import change_role

    raise typer.Exit(change_role(address, worker_id, becomes, grace))


def restart(
    names: Annotated[
        list[str] | None, typer.Argument(help="As `decode-0`, `gateway`; none: every process.")
    ] = None,
    grpc_port: Annotated[int, typer.Option(help="Public port of the system.")] = GRPC_PORT,
) -> None:
    """Replace processes of a running `diptych up` one after the other, without refusing a request."""
    from diptych.cli.admin_commands import restart_processes

    raise typer.Exit(restart_processes(grpc_port, names or []))


def flush(
    worker_id: Annotated[str, typer.Argument(help="Empty: every worker.")] = "",
    address: AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
) -> None:
    """Let workers forget the cached prefixes that no running request holds."""
    from diptych.cli.admin_commands import flush_prefix_cache

    raise typer.Exit(flush_prefix_cache(address, worker_id))
