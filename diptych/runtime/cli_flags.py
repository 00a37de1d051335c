"""The flags of a program's settings, with a --help that is written for its users."""

import re
from argparse import ArgumentParser

from pydantic_settings import BaseSettings, CliSettingsSource

# None means what the description says, and how a fresh value is made is nobody's business.
_NO_DEFAULT = re.compile(r" ?\(default(: null| factory: [^)]*)\)")
_VARIABLES = "Each flag is also a variable: --grpc-port is DIPTYCH_GRPC_PORT."


def flags_of(settings: type[BaseSettings], program: str) -> CliSettingsSource[ArgumentParser]:
    """Reads flags; what is wrong with them is raised, not printed. The class's docstring opens --help."""
    flags: CliSettingsSource[ArgumentParser] = CliSettingsSource(
        settings, cli_prog_name=program, cli_exit_on_error=False
    )
    parser = flags.root_parser
    parser.description = f"{parser.description}\n{_VARIABLES}"
    for action in parser._actions:
        if action.help:
            action.help = _NO_DEFAULT.sub("", action.help)
    return flags
