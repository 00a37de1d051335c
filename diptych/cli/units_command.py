"""`diptych units`: systemd units for a gateway and workers on machines without a cluster's scheduler."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.stack import MODULES
from diptych.runtime.python_module import module_command

_WAIT_S = 10
"""Seconds beyond a program's own shutdown before systemd kills it."""
_STOP_S: Mapping[str, int] = {"gateway": 40, "prefill": 20, "decode": 20, "encode": 20}
_UNIT = """\
# Made by `diptych units`. {environment} has the settings of all programs, as DIPTYCH_… variables;
# {folder}/{role}.env may have those of this role.
[Unit]
Description=Diptych {role}{instance}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
EnvironmentFile={environment}
EnvironmentFile=-{folder}/{role}.env
Environment=DIPTYCH_WORKER_ID={worker_id}
User={user}
Restart=on-failure
RestartSec=2
# Exit status 2 is a wrong setting, which another start would not mend.
RestartPreventExitStatus=2
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={stop_s}
LimitNOFILE=65536
LimitMEMLOCK=infinity
NoNewPrivileges=true
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectControlGroups=true
RestrictSUIDSGID=true
LockPersonality=true

[Install]
WantedBy=multi-user.target
"""


def units(
    folder: Annotated[Path, typer.Argument(help="Gets the units, such as /etc/systemd/system.")],
    role: Annotated[
        list[str] | None,
        typer.Option(help="gateway, prefill, decode or encode; may be repeated; default: all."),
    ] = None,
    environment: Annotated[
        Path, typer.Option(help="File with the settings, which only its owner should read.")
    ] = Path("/etc/diptych/diptych.env"),
    user: Annotated[str, typer.Option(help="User that runs the programs.")] = "diptych",
) -> None:
    """Write systemd units: diptych-gateway.service, and diptych-ROLE@.service for prefill, decode and encode.

    Workers are templates: `systemctl enable --now diptych-decode@0 diptych-decode@1` starts two.
    """
    chosen = role or list(MODULES)
    if unknown := [one for one in chosen if one not in MODULES]:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(MODULES)}", param_hint="--role")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in chosen:
            path = folder / unit_name(one)
            path.write_text(unit_text(one, environment.absolute(), user))
            print(path)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}") from None
    print("then: systemctl daemon-reload", file=sys.stderr)


def unit_name(role: str) -> str:
    """Return the name of a role's unit; workers are templates."""
    return f"diptych-{role}.service" if role == "gateway" else f"diptych-{role}@.service"


def unit_text(role: str, environment: Path, user: str) -> str:
    """Return the unit of a role, which runs this installation."""
    worker = role != "gateway"
    return _UNIT.format(
        role=role,
        instance=" %i" if worker else "",
        command=_quoted(module_command(MODULES[role])),
        environment=environment,
        folder=environment.parent,
        worker_id=f"{role}-%H-%i" if worker else "gateway-%H",
        user=user,
        stop_s=_STOP_S[role] + _WAIT_S,
    )


def _quoted(command: Sequence[str]) -> str:
    """Return a command line of systemd, in which % begins a specifier and $ a variable."""
    return " ".join(shlex.quote(part).replace("%", "%%").replace("$", "$$") for part in command)
