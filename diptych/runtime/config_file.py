"""Configuration files: YAML with the flags' names as keys, and sections of the programs."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from diptych.runtime.flag_names import target

SECTIONS = ("gateway", "prefill", "decode", "encode")
_NEAR = 0.6


class BadConfigFile(ValueError):
    """A configuration file that cannot be read; the message has a line for each fault."""


@dataclass(frozen=True)
class Entry:
    """Line of a file: a key, its value as a flag would have it, and its place."""

    key: str
    text: str
    where: str
    """Place in the file, such as `serving.yaml:3`."""

    @property
    def name(self) -> str:
        """The key as a field's name, which may be an old one."""
        return self.key.replace("-", "_")


@dataclass(frozen=True)
class ConfigFile:
    """Entries that every program reads, and those of single programs."""

    common: tuple[Entry, ...] = ()
    sections: dict[str, tuple[Entry, ...]] = field(default_factory=dict)

    def of(self, program: str) -> tuple[Entry, ...]:
        """Return the entries that are `program`'s, by increasing precedence."""
        return (*self.common, *self.sections.get(program, ()))


def read_config_file(path: Path) -> ConfigFile:
    """Read a file; its callers know which keys there are. Raises BadConfigFile for what has not this form."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise BadConfigFile(f"cannot read {path}: {reason}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise BadConfigFile(f"{path}:{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise BadConfigFile(f"{path}: not YAML: {error}") from None
    if root is None:
        return ConfigFile()
    common: list[Entry] = []
    sections: dict[str, tuple[Entry, ...]] = {}
    for key, where, node in _members(path, root):
        if key in SECTIONS:
            sections[key] = tuple(_entry(*one) for one in _members(path, node))
        else:
            common.append(_entry(key, where, node))
    return ConfigFile(tuple(common), sections)


def _members(path: Path, node: yaml.Node) -> list[tuple[str, str, yaml.Node]]:
    """Return key, place and value of each member of a mapping. Two names of one setting are a fault."""
    if not isinstance(node, yaml.MappingNode):
        if isinstance(node, yaml.ScalarNode) and not node.value:
            return []  # a section without anything in it
        raise BadConfigFile(f"{path}:{node.start_mark.line + 1}: must be lines of KEY: VALUE")
    members: list[tuple[str, str, yaml.Node]] = []
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise BadConfigFile(f"{path}:{line}: a key must be the name of a flag")
        key = key_node.value.removeprefix("--")
        name = target(key.replace("-", "_"))
        if name in lines:
            raise BadConfigFile(f"{path}:{line}: {key}: set in line {lines[name]} already")
        lines[name] = line
        members.append((key, f"{path}:{line}", value))
    return members


def _entry(key: str, where: str, node: yaml.Node) -> Entry:
    if not isinstance(node, yaml.ScalarNode):
        raise BadConfigFile(f"{where}: {key}: must be one value, not a list or a mapping")
    if node.tag == "tag:yaml.org,2002:null":
        raise BadConfigFile(f"{where}: {key}: has no value")
    return Entry(key, node.value, where)


def unknown_key(entry: Entry, known: Iterable[str]) -> str:
    """Return the fault of a key that no setting has, with the nearest of the fields `known`."""
    return f"{entry.where}: {entry.key}: no such setting{nearest(entry.name, known)}"


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return " (prefix-and-name?)" for the field most like `name`, or nothing."""
    near = difflib.get_close_matches(name, tuple(known), n=1, cutoff=_NEAR)
    return f" ({prefix}{near[0].replace('_', '-')}?)" if near else ""
