"""`diptych config`: the effective configuration of `diptych up`, with origins and a digest."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from diptych import __version__
from diptych.cli.preflight import BadOptions, Program, read_programs, settable_fields
from diptych.cli.stack import OWNED_FLAGS
from diptych.cli.stack_options import FLAG_FIELDS, StackOptions
from diptych.runtime.discovery.outage_log import without_login
from diptych.runtime.settings import config_digest
from diptych.runtime.settings_sources import DEFAULT, VARIABLE_PREFIX, flag_of

_BY_LAUNCHER = "diptych up"
_HIDDEN = "hidden"
_VALUE_WIDTH = 40


class EffectiveValue(NamedTuple):
    """A setting's value and origin. `settable` is False where a file cannot say the same: it is a comment."""

    value: Any
    origin: str
    settable: bool = True


Section = dict[str, EffectiveValue]


def print_config(options: StackOptions, *, as_json: bool) -> int:
    """Print the configuration as a file for `--config`. Exit status 1 when nothing could start with it."""
    try:
        programs = read_programs(options)
    except BadOptions as error:
        print(f"diptych: {error}", file=sys.stderr)
        return 1
    digest = config_digest([one.settings for one in programs])
    common = _common(options, programs)
    sections = {role: _section(options, one) for role, one in _one_a_role(programs).items()}
    if as_json:
        described = {
            "version": __version__,
            "digest": digest,
            **_as_json(common),
            **{role: _as_json(section) for role, section in sections.items()},
        }
        print(json.dumps(described, indent=1))
        return 0
    print(f"# diptych {__version__}, configuration {digest}")
    for line in _lines(common):
        print(line)
    for role, section in sections.items():
        print(f"{role}:" if any(one.settable for one in section.values()) else f"# {role}:")
        for line in _lines(section):
            print(f"  {line}")
    return 0


def _one_a_role(programs: Sequence[Program]) -> Mapping[str, Program]:
    """Return the first process of each role: those of one role differ in names and cores only."""
    found: dict[str, Program] = {}
    for one in programs:
        found.setdefault(one.role, one)
    return found


def _common(options: StackOptions, programs: Sequence[Program]) -> Section:
    section = {name: _common_value(options, name, programs) for name in FLAG_FIELDS}
    section["redis_url"] = _redis_url(options)
    if options.secret is not None:
        section["secret"] = EffectiveValue(_HIDDEN, f"{VARIABLE_PREFIX}SECRET", settable=False)
    return section


def _common_value(options: StackOptions, name: str, programs: Sequence[Program]) -> EffectiveValue:
    """Return the value of a flag of `up`; where it is left to the programs, the one that they take."""
    value = getattr(options, name)
    if value is None and flag_of(name) not in OWNED_FLAGS:
        taken = [getattr(one.settings, name) for one in programs if name in type(one.settings).model_fields]
        overridden = any(f"{one.role}.{name}" in options.origins for one in programs)
        value = taken[0] if taken and not overridden else None
    return EffectiveValue(value, options.origin(name), settable=value is not None)


def _redis_url(options: StackOptions) -> EffectiveValue:
    url, origin = options.redis_url, options.origin("redis_url")
    if url is None:
        return EffectiveValue(None, origin, settable=False)
    shown = without_login(url)
    return EffectiveValue(shown, origin, settable=shown == url)


def _section(options: StackOptions, program: Program) -> Section:
    """Return the settings of a program that are no flags of `up`, or are set otherwise for it."""
    section: Section = {}
    for name in settable_fields(program.role):
        overridden = options.origins.get(f"{program.role}.{name}")
        if overridden is None and (name in FLAG_FIELDS or name == "threads"):
            continue
        value = getattr(program.settings, name)
        origin = program.values[name].origin if name in program.values else DEFAULT
        if overridden is not None:
            section[name] = EffectiveValue(value, overridden)
        elif origin.startswith("--"):
            section[name] = EffectiveValue(value, _BY_LAUNCHER, settable=False)
        else:
            section[name] = EffectiveValue(value, origin, settable=value is not None)
    return section


def _as_json(section: Section) -> dict[str, Any]:
    return {
        flag_of(name): {"value": _plain(one.value), "origin": one.origin} for name, one in section.items()
    }


def _lines(section: Section) -> Iterator[str]:
    for name, (value, origin, settable) in section.items():
        shown = "" if value is None else _scalar(_plain(value))
        yield f"{'' if settable else '# '}{flag_of(name)}: {shown}".ljust(_VALUE_WIDTH) + f"  # {origin}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _scalar(value: Any) -> str:
    """Return a value as YAML has it, on one line."""
    text: str = yaml.safe_dump(value, width=sys.maxsize, default_flow_style=True, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
