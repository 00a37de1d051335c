"""The command class of `diptych up` and `diptych config`: flags over variables over a configuration file."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from diptych.cli.stack import OWNED_FLAGS, BadOverride, parse_override
from diptych.cli.stack_options import FLAG_FIELDS, ORIGINS, OVERRIDES
from diptych.runtime import settings_sources as sources
from diptych.runtime.config_file import (
    SECTIONS,
    BadConfigFile,
    ConfigFile,
    Entry,
    read_config_file,
    unknown_key,
)
from diptych.runtime.flag_names import canonical, names_of, renamed, target
from diptych.runtime.settings_sources import VARIABLE_PREFIX, BadSettings, Fault, Source, flag_of

Override = tuple[str, str, str]
_COMPUTATION = ("dtype", "quantization")
RAY_FLAG, LOCAL = "--ray", "local"
_SWITCHES = frozenset({"insecure", "auto_roles"})


class StackCommand(TyperCommand):
    """Reads what its flags do not say from variables and from the file of --config.

    Refuses a flag that only programs have with the `--set` that would give it to them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        args, flags = self._today(ctx, _with_ray_address(args))
        for position, arg in enumerate(args):
            flag = arg.partition("=")[0]
            if flag.startswith("--") and flag not in own and (sets := _sets(args[position:])):
                raise typer.BadParameter(f"it is a flag of a program: {sets}", ctx=ctx, param_hint=flag)
        try:
            self._read_defaults(ctx, flags)
        except (BadConfigFile, BadSettings) as error:
            print(f"diptych: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        try:
            parsed: list[str] = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = error.param.name if error.param is not None else None
            origin = ctx.meta.get(ORIGINS, {}).get(name, "")
            if name is None or not origin or origin.startswith("--"):
                raise
            raise typer.BadParameter(error.message, ctx=ctx, param_hint=_hint(origin, name)) from None
        return parsed

    def _today(self, ctx: Any, args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the arguments with today's names of flags, and the text of each flag by field."""
        today: list[str] = []
        found: dict[str, str] = {}
        rest = list(args)
        while rest:
            word = rest.pop(0)
            flag, equals, text = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            if not flag.startswith("--") or target(name) not in (*FLAG_FIELDS, sources.CONFIG_FLAG):
                today.append(word)
                continue
            if not equals and rest and target(name) not in _SWITCHES:
                text = rest[0]
            try:
                field, meant = canonical(name, text)
            except ValueError as error:
                raise typer.BadParameter(str(error), ctx=ctx, param_hint=flag) from None
            found[field] = meant
            if field != name:
                today.append(f"--{flag_of(field)}={meant}")
                if not equals and rest:
                    rest.pop(0)
                if (warning := sources.rename_warning(name, text, "--")) is not None:
                    _warn(warning)
            else:
                today.append(word)
                if not equals and rest and target(name) not in _SWITCHES:
                    today.append(rest.pop(0))
        return today, found

    def _read_defaults(self, ctx: Any, flags: dict[str, str]) -> None:
        """Make variables and the file the defaults of flags that are not given."""
        path = flags.pop(sources.CONFIG_FLAG, None)
        file = read_config_file(Path(path)) if path is not None else ConfigFile()
        common, programs = _split(file)
        given = sources.from_flags(flags.items())
        variables = sources.from_variables(FLAG_FIELDS, _variables())
        stated = sources.from_entries(common)
        for line in dict.fromkeys(
            (*stated.warnings, *sources.from_entries(one for _, one in programs).warnings)
        ):
            _warn(line)
        values = sources.merge((given, variables, stated))
        ctx.default_map = {name: value.text for name, value in values.items() if name not in given.values}
        for other in _COMPUTATION:  # given with a flag, the other one keeps its default
            if other not in values:
                ctx.default_map.pop(other, None)
        ctx.meta[ORIGINS] = {name: value.origin for name, value in values.items()}
        ctx.meta[OVERRIDES] = [
            (role, entry) for role, entry in programs if not _outranked(role, entry, given)
        ]


def stack_overrides(
    context: typer.Context, sets: Iterable[str]
) -> tuple[tuple[Override, ...], dict[str, str]]:
    """Return what the file and, over it, --set say to programs, and the origin of each by role.field."""
    overrides: dict[tuple[str, str], str] = {}
    origins: dict[str, str] = {}
    chosen = [_parse_set(text) for text in sets]
    decided = {role for role, flag, _ in chosen if flag in _COMPUTATION}
    for role, entry in context.meta.get(OVERRIDES, []):
        try:
            field, value = canonical(entry.name, entry.text)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"{entry.where}: {entry.key}") from None
        if not (role in decided and field in _COMPUTATION):
            overrides[role, flag_of(field)] = value
            origins[f"{role}.{field}"] = entry.where
    for role, flag, value in chosen:
        overrides[role, flag] = value
        origins[f"{role}.{flag.replace('-', '_')}"] = "--set"
    return tuple((role, flag, value) for (role, flag), value in overrides.items()), origins


def _with_ray_address(args: Sequence[str]) -> list[str]:
    """Return the arguments with an address behind every --ray: "local" where none follows."""
    following = [*args[1:], "--"]
    return [
        f"{RAY_FLAG}={LOCAL}" if word == RAY_FLAG and after.startswith("-") else word
        for word, after in zip(args, following, strict=False)
    ]


def _parse_set(text: str) -> Override:
    try:
        override = parse_override(text)
    except (BadOverride, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--set") from None
    role, _, flag = text.partition("=")[0].partition(".")
    name = flag.removeprefix("--").replace("-", "_")
    if (names := renamed(name, text.partition("=")[2])) is not None:
        _warn(" is now ".join(f"--set {role}.{flag_of(one).replace(' ', '=')}" for one in names))
    return override


def _variables() -> dict[str, str]:
    """Return the variables that are not empty; DIPTYCH_THREADS is that of both kinds of workers."""
    variables = {name.upper(): text for name, text in os.environ.items() if text}
    threads = variables.get(f"{VARIABLE_PREFIX}THREADS")
    if threads is not None:
        for role in ("PREFILL", "DECODE"):
            variables.setdefault(f"{VARIABLE_PREFIX}{role}_THREADS", threads)
    return variables


def _split(file: ConfigFile) -> tuple[list[Entry], list[tuple[str, Entry]]]:
    """Return the entries that are flags of `up`, and (role, entry) for those of programs.

    A common key that `up` does not have goes to every program that has it. Raises BadSettings.
    """
    if not file.common and not file.sections:
        return [], []
    from diptych.cli.preflight import roles_with, settable_fields

    common, programs, faults = [], [], []
    known = {*FLAG_FIELDS, *(field for role in SECTIONS for field in settable_fields(role))}
    for entry in file.common:
        field = target(entry.name)
        if field in FLAG_FIELDS:
            common.append(entry)
        elif roles := roles_with(flag_of(field)):
            programs += [(role, entry) for role in roles]
        else:
            faults.append(entry)
    for role, entries in file.sections.items():
        for entry in entries:
            if target(entry.name) in settable_fields(role):
                programs.append((role, entry))
            else:
                faults.append(entry)
    if faults:
        raise BadSettings(Fault(_fault(entry, known)) for entry in faults)
    return common, programs


def _fault(entry: Entry, known: set[str]) -> str:
    """Return why a key is none of its section, or of the common ones."""
    if flag_of(target(entry.name)) in OWNED_FLAGS or target(entry.name) in known:
        return f"{entry.where}: {entry.key}: not a setting of this section"
    return unknown_key(entry, {name for field in known for name in names_of(field)})


def _outranked(role: str, entry: Entry, flags: Source) -> bool:
    """Return whether a flag of `up` or a variable sets what a file says to a program."""
    field = target(entry.name)
    if field in _COMPUTATION:
        same: tuple[str, ...] = _COMPUTATION
    else:
        same = (f"{role}_threads",) if field == "threads" else (field,)
    names = {f"{VARIABLE_PREFIX}{name.upper()}" for one in same for name in names_of(one)}
    return bool(flags.values.keys() & set(same) or names & _variables().keys())


def _warn(line: str) -> None:
    print(f"diptych: {line}", file=sys.stderr)


def _hint(origin: str, field: str) -> str:
    return f"{origin}: {flag_of(field)}" if sources.is_place(origin) else origin


def _sets(args: Sequence[str]) -> str:
    """Return how the first of them is given to the programs that have it; nothing where none has."""
    from diptych.cli.preflight import roles_with

    flag, equals, value = args[0].removeprefix("--").partition("=")
    if not equals:
        value = args[1] if len(args) > 1 and not args[1].startswith("--") else "…"
    today = flag_of(target(flag.replace("-", "_")))
    return " ".join(f"--set {role}.{today}={value}" for role in roles_with(today))
