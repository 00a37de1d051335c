"""Flags of a program's settings: rows for the reference page, and --help in the look of `diptych --help`."""

import inspect
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from diptych.runtime.flag_names import RENAMED, SYNONYMS
from diptych.runtime.settings import ProgramSettings
from diptych.runtime.settings_sources import CONFIG_FLAG, VARIABLE_PREFIX, flag_of

VARIABLES = "Each flag is also a variable (--grpc-port is DIPTYCH_GRPC_PORT) and a key of the --config file."
CONFIG_HELP = "Read settings from this YAML file; flags and variables win over it."
CONFIG_SECTION = "Configuration"
_KINDS = {int: "integer", float: "number", bool: "switch", str: "text"}


class SettingRow(NamedTuple):
    """Setting as the reference and --help show it."""

    flag: str
    variable: str
    type: str
    default: str
    description: str
    section: str
    old_names: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()


def setting_rows(settings: type[ProgramSettings]) -> Iterator[SettingRow]:
    """Yield the settings of a program that users set, by section."""
    yield SettingRow(f"--{CONFIG_FLAG}", "", "path", "", CONFIG_HELP, CONFIG_SECTION)
    for name in settings.public_fields():
        field = settings.model_fields[name]
        extra = field.json_schema_extra
        yield SettingRow(
            flag=f"--{flag_of(name)}",
            variable=f"{VARIABLE_PREFIX}{name.upper()}",
            type=_type_of(field),
            default=_default_of(field),
            description=field.description or "",
            section=str(extra["section"]) if isinstance(extra, dict) else "Other",
            old_names=other_flags(RENAMED, name),
            synonyms=other_flags(SYNONYMS, name),
        )


def other_flags(table: Any, field: str) -> tuple[str, ...]:
    """Return the flags by which a table of names sets `field`."""
    return tuple(f"--{flag_of(name)}" for name, its in table.items() if its == field)


def print_help(settings: type[ProgramSettings]) -> None:
    """Print a program's --help."""
    import typer  # what a serving program needs not

    def parameter(row: SettingRow) -> inspect.Parameter:
        takes_value = row.type != _KINDS[bool]
        option = typer.Option(
            row.flag,
            help=row.description,
            metavar=row.type if takes_value else None,
            rich_help_panel=row.section,
            show_default=bool(row.default),
        )
        return inspect.Parameter(
            row.flag.removeprefix("--").replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=row.default if takes_value else row.default == "true",
            annotation=Annotated[str if takes_value else bool, option],
        )

    parameters = [parameter(row) for row in setting_rows(settings)]

    def program(**_: Any) -> None:
        raise AssertionError("unreachable: --help ends it")

    program.__doc__ = f"{inspect.getdoc(settings)}\n\n{VARIABLES}"
    program.__annotations__ = {one.name: one.annotation for one in parameters}
    program.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(program)
    app(["--help"], prog_name=f"diptych {settings.program}", standalone_mode=False)


def _default_of(field: FieldInfo) -> str:
    """Return the default as a flag would give it; nothing where the description says what is done."""
    if field.default_factory is not None or field.default is None:
        return ""
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def _type_of(field: FieldInfo) -> str:
    """Return a field's type in words: `auto|cpu`, `integer 0–65535`, `switch`."""
    bounds = _Bounds()
    ways = _ways(field.annotation, bounds)
    bounds.add(field.metadata)
    return "|".join(f"{way}{bounds}" if way in ("integer", "number") else way for way in ways)


class _Bounds:
    """The least and the greatest value of a number."""

    def __init__(self) -> None:
        self._low = self._high = ""

    def add(self, metadata: Any) -> None:
        for rule in metadata:
            if isinstance(rule, FieldInfo):
                self.add(rule.metadata)
            elif isinstance(rule, Ge):
                self._low = f"{rule.ge}"
            elif isinstance(rule, Gt):
                self._low = f">{rule.gt}"
            elif isinstance(rule, Le):
                self._high = f"{rule.le}"
            elif isinstance(rule, Lt):
                self._high = f"<{rule.lt}"

    def __str__(self) -> str:
        if self._low and self._high:
            return f" {self._low}–{self._high}"
        if self._low.startswith(">"):
            return f" {self._low}"
        return f" ≥{self._low}" if self._low else ""


def _ways(annotation: Any, bounds: _Bounds) -> list[str]:
    """Return the ways to write a value of a type, None left out."""
    origin = get_origin(annotation)
    if origin is Literal:
        return [str(one) for one in get_args(annotation)]
    if origin is Annotated:
        bounds.add(annotation.__metadata__)
        return _ways(get_args(annotation)[0], bounds)
    if origin in (Union, types.UnionType):
        return [way for one in get_args(annotation) if one is not type(None) for way in _ways(one, bounds)]
    return [_KINDS.get(annotation, "path")]
