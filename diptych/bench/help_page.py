"""Help page of `diptych bench` in the look of `diptych --help`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import typer


def print_help(parser: argparse.ArgumentParser) -> None:
    """Print the parser's flags by group, each with its default."""
    parameters = list(_parameters(parser))

    def command(**_: Any) -> None:
        raise AssertionError("unreachable: --help ends it")

    command.__doc__ = f"{parser.description}\n\n{parser.epilog}"
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(command)
    app(["--help"], prog_name=parser.prog, standalone_mode=False)


def _parameters(parser: argparse.ArgumentParser) -> Iterator[inspect.Parameter]:
    for group in parser._action_groups:
        for action in group._group_actions:
            if "--help" in action.option_strings:
                continue
            takes_value = action.nargs != 0
            default = _shown(action.default)
            option = typer.Option(
                action.option_strings[0],
                help=action.help,
                metavar=_metavar(action) if takes_value else None,
                rich_help_panel=group.title,
                show_default=bool(default),
            )
            yield inspect.Parameter(
                action.dest,
                inspect.Parameter.KEYWORD_ONLY,
                default=default if takes_value else False,
                annotation=Annotated[str if takes_value else bool, option],
            )


def _metavar(action: argparse.Action) -> str:
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return str(action.metavar or ("path" if action.type is not None else "text"))


def _shown(default: Any) -> str:
    """Return a default as its flag would give it."""
    if default is None or default is False or default == {}:
        return ""
    return ":".join(map(str, default)) if isinstance(default, tuple) else str(default)
