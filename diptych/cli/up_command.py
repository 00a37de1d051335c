"""`diptych up` as a command: who gives it a flag of a program learns how that is done."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand


class UpCommand(TyperCommand):
    """Refuses a flag that only programs have with the `--set` that would give it to them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for position, arg in enumerate(args):
            flag = arg.partition("=")[0]
            if flag.startswith("--") and flag not in own and (sets := _sets(args[position:])):
                raise typer.BadParameter(f"it is a flag of a program: {sets}", ctx=ctx, param_hint=flag)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def _sets(args: Sequence[str]) -> str:
    """How the first of them is given to the programs that have it; nothing where none has."""
    from diptych.cli.preflight import roles_with

    flag, equals, value = args[0].removeprefix("--").partition("=")
    if not equals:
        value = args[1] if len(args) > 1 and not args[1].startswith("--") else "…"
    return " ".join(f"--set {role}.{flag}={value}" for role in roles_with(flag))
