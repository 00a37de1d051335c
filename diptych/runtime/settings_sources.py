"""Sources of a program's settings: flags, over variables, over a file. Each value keeps its origin."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from diptych.runtime.config_file import Entry, nearest, read_config_file, unknown_key
from diptych.runtime.flag_names import canonical, names_of, renamed, target

VARIABLE_PREFIX = "DIPTYCH_"
CONFIG_FLAG = "config"
DEFAULT = "default"
_PAIR = ("dtype", "quantization")
"""Settings that are one choice: the source that names one of them decides both."""


class Fault(NamedTuple):
    """Fault of a setting, or of no single one where `field` is empty."""

    message: str
    field: str = ""
    origin: str = ""
    """Origin, as of a `Value`."""

    def __str__(self) -> str:
        """Return one line, which names the flag and its variable, or the place in a file."""
        if not self.field:
            return self.message
        if is_place(self.origin):
            return f"{self.origin}: {flag_of(self.field)}: {self.message}"
        return f"--{flag_of(self.field)} ({VARIABLE_PREFIX}{self.field.upper()}): {self.message}"


class BadSettings(ValueError):
    """Flags, variables or a file that a program cannot run with."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(map(str, self.faults)))


class Value(NamedTuple):
    """A field's value as text, and its origin: `--max-batch`, `DIPTYCH_MAX_BATCH` or `serving.yaml:3`."""

    text: str
    origin: str


class Source(NamedTuple):
    """The values of one source by field, and a line for each name of the release before."""

    values: Mapping[str, Value]
    warnings: tuple[str, ...] = ()


def flag_of(field: str) -> str:
    """Return a field's flag without its dashes, which is its key in a file as well."""
    return field.replace("_", "-")


def is_place(origin: str) -> bool:
    """Return whether an origin is a line of a file."""
    return not origin.startswith(("--", VARIABLE_PREFIX)) and origin not in ("", DEFAULT)


LISTS = ("--served-model-name", "--cors-allow-origin", "--lora", "--kv-tier")
"""Flags that take several values."""


REPEATED = ("--model", "--model-split", "--small-requests")
"""Flags that may come several times, with a value each."""


def join_lists(argv: Sequence[str]) -> list[str]:
    """Return a command line in which each flag that takes several values stands once, these joined by commas.

    Values of `LISTS` may follow one another (``--served-model-name a b``), or come with a flag each.
    """
    return _join_following(_join_repeated(argv))


def _join_repeated(argv: Sequence[str]) -> list[str]:
    """Join the values of `REPEATED` where a flag comes more than once."""
    words = [flag_of(word.partition("=")[0]) for word in argv]
    several = {flag for flag in REPEATED if words.count(flag) > 1}
    values: dict[str, list[str]] = {}
    rest: list[str] = []
    given = iter(argv)
    for word in given:
        flag, equals, text = word.partition("=")
        flag = flag_of(flag)
        if flag not in several:
            rest.append(word)
            continue
        if flag not in values:
            values[flag] = []
            rest.append(flag)
        values[flag].append(text if equals else next(given, ""))
    return [f"{word}={','.join(values[word])}" if word in values else word for word in rest]


def _join_following(argv: Sequence[str]) -> list[str]:
    """Join the values of `LISTS`."""
    values: dict[str, list[str]] = {}
    rest: list[str] = []
    into: list[str] | None = None
    for word in argv:
        flag, equals, text = word.partition("=")
        flag = flag_of(flag)  # as `parse_flags` takes it: with underscores, too
        if flag in LISTS:
            if flag not in values:
                values[flag] = []
                rest.append(flag)
            into = values[flag]
            into += [text] if equals else []
            into = None if equals else into
        elif into is not None and not word.startswith("-"):
            into.append(word)
        else:
            into = None
            rest.append(word)
    return [f"{word}={','.join(values[word])}" if values.get(word) else word for word in rest]


def parse_flags(
    argv: Sequence[str], fields: Iterable[str], switches: frozenset[str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Split a command line into (field's name, value) pairs, and the faults of what is no flag.

    `switches` are the fields that take no value: `--flag`, `--no-flag` and `--flag=true` set them.
    """
    known = {name for field in fields for name in names_of(field)} | {CONFIG_FLAG}
    found: list[tuple[str, str]] = []
    faults: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_flag = flag.startswith("--")
        if is_flag and name.startswith("no_") and target(name[3:]) in switches and not equals:
            found.append((name[3:], "false"))
        elif not is_flag:
            faults.append(f"{word}: not a flag")
        elif name not in known:
            faults.append(f"{flag}: no such flag{nearest(name, known, '--')}")
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif equals:
            found.append((name, text))
        elif target(name) in switches:
            found.append((name, "true"))
        elif rest and not rest[0].startswith("--"):
            found.append((name, rest.pop(0)))
        else:
            faults.append(f"{flag}: needs a value")
    return found, faults


def from_flags(pairs: Iterable[tuple[str, str]]) -> Source:
    """Return the values of a command line. Of one flag that is given twice the last one counts."""
    return _source((name, text, f"--{flag_of(name)}") for name, text in pairs)


def from_variables(fields: Iterable[str], environment: Mapping[str, str] = os.environ) -> Source:
    """Return the values of DIPTYCH_* variables. A field's own name wins over its others."""
    upper = {name.upper(): text for name, text in environment.items()}
    found = []
    for field in fields:
        for name in reversed(names_of(field)):
            variable = f"{VARIABLE_PREFIX}{name.upper()}"
            if variable in upper:
                found.append((name, upper[variable], variable))
    return _source(found)


def from_entries(entries: Iterable[Entry]) -> Source:
    """Return the values of a file's lines; later entries win."""
    return _source((entry.name, entry.text, entry.where) for entry in entries)


def read_program_file(path: Path, program: str, fields: Iterable[str]) -> Source:
    """Return what a configuration file says to `program`. Raises BadSettings, BadConfigFile.

    A file may have sections of all programs: the others' are not read.
    """
    file = read_config_file(path)
    check_keys(file.of(program), fields)
    return from_entries(file.of(program))


def check_keys(entries: Iterable[Entry], fields: Iterable[str]) -> None:
    """Raise BadSettings for keys that are none of `fields`."""
    known = {name for field in fields for name in names_of(field)}
    if faults := [unknown_key(entry, known) for entry in entries if entry.name not in known]:
        raise BadSettings(map(Fault, faults))


def merge(sources: Iterable[Source]) -> dict[str, Value]:
    """Return the values of sources by decreasing precedence."""
    values: dict[str, Value] = {}
    for source in sources:
        if "dtype" in values or "quantization" in values:
            named = {field: value for field, value in source.values.items() if field not in _PAIR}
        else:
            named = dict(source.values)
        values = {**named, **values}
    return values


def _source(found: Iterable[tuple[str, str, str]]) -> Source:
    """Return (name, value, origin) triples as the values of fields. Raises BadSettings."""
    values: dict[str, Value] = {}
    warnings: list[str] = []
    for name, text, origin in found:
        try:
            field, meant = canonical(name, text)
        except ValueError as error:
            raise BadSettings([Fault(str(error), name, origin)]) from None
        values[field] = Value(meant, origin)
        if (warning := rename_warning(name, text, origin)) is not None:
            warnings.append(warning)
    return Source(values, tuple(warnings))


def rename_warning(name: str, text: str, origin: str) -> str | None:
    """Return the line about a name of the release before, spelled as its origin spells it; or None."""
    if (names := renamed(name, text)) is None:
        return None
    place = f"{origin}: " if is_place(origin) else ""
    return place + " is now ".join(_spelled(one, origin) for one in names)


def _spelled(name: str, origin: str) -> str:
    """Return a name, or a name and a value with a space between, as a flag, a variable or a key."""
    name, _, value = name.partition(" ")
    if is_place(origin):
        return flag_of(name) + (f": {value}" if value else "")
    if origin.startswith("--"):
        return f"--{flag_of(name)}" + (f" {value}" if value else "")
    return f"{VARIABLE_PREFIX}{name.upper()}" + (f"={value}" if value else "")
