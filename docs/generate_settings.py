"""Reference pages of the settings and of the HTTP API, for docs/generate.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decode_worker.config import DecodeSettings
from diptych.cli.stack_options import option_rows
from diptych.runtime.cli_flags import SettingRow, setting_rows
from gateway.config import GatewaySettings
from gateway.frontends.openai.openapi import build_openapi
from gateway.ports import GRPC_PORT, HTTP_PORT
from prefill_worker.config import PrefillSettings

CONFIGURATION = """# Configuration

Every setting is a flag, a variable and a key of a configuration file. Flags win over variables, which win over the file, which
wins over defaults. `diptych config` prints the effective configuration, each value with where it came from, and its digest.

```sh
diptych config --kv-memory-mib 4096
```

`--config FILE` reads YAML, whose keys are the flags' names. A file for `up` may have sections for one program each:

```yaml
model: bundled
quantization: int8
decode:
  max-batch: 32
```

`diptych up --set decode.max-batch=8` sets a flag of one program that `up` itself lacks, and may be repeated.

An unknown key or flag is an error that names the nearest known one; an unknown `DIPTYCH_*` variable is a warning. Old names of flags
work and warn; vLLM's names work as they are. `DIPTYCH_SECRET` has no flag: it is the hexadecimal key for names of prefixes and for
resume tokens, the same in all gateways.

"""


def configuration_page() -> str:
    """Return the reference of all flags: those of `up`, then each program's."""
    programs = {
        "diptych up": option_rows(grpc_port=GRPC_PORT, http_port=HTTP_PORT),
        "diptych gateway": setting_rows(GatewaySettings),
        "diptych prefill": setting_rows(PrefillSettings),
        "diptych decode": setting_rows(DecodeSettings),
    }
    return CONFIGURATION + "".join(f"## {name}\n\n{_sections(rows)}" for name, rows in programs.items())


def _sections(rows: Iterable[SettingRow]) -> str:
    found: dict[str, list[SettingRow]] = {}
    for row in rows:
        found.setdefault(row.section, []).append(row)
    return "".join(f"**{name}**\n\n{_table(rows)}\n" for name, rows in found.items())


def _table(rows: Iterable[SettingRow]) -> str:
    lines = ["| flag | values | default | |", "|---|---|---|---|"]
    for row in rows:
        names = [
            f"`{row.flag}`",
            *(f"also `{one}`" for one in row.synonyms),
            *(f"old: `{one}`" for one in row.old_names),
        ]
        values, default = row.type.replace("|", "\\|"), f"`{row.default}`" if row.default else ""
        lines.append(f"| {', '.join(names)} | {values} | {default} | {row.description} |")
    return "\n".join(lines) + "\n"


def http_page() -> str:
    """Return the reference of the HTTP API, from its OpenAPI document."""
    api = build_openapi()
    parts = [
        "# HTTP reference\n\nThe same as `/openapi.json` of a running gateway, which `/docs` shows as a page.\n\n"
    ]
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            parts.append(f"## {method.upper()} {path}\n\n{operation.get('summary', '')}\n\n")
            body = (
                operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            )
            if body:
                parts.append(f"Body: {_kind(body)}\n\n")
    for name, schema in api["components"]["schemas"].items():
        parts.append(f"### {name}\n\n{schema.get('description', '')}\n\n")
        if members := schema.get("properties"):
            required = schema.get("required", [])
            rows = [
                f"| `{member}`{' (required)' if member in required else ''} | {_kind(kind)} | {_description(kind)} |\n"
                for member, kind in members.items()
            ]
            parts.append("| member | type | |\n|---|---|---|\n" + "".join(rows) + "\n")
    return "".join(parts)


def _description(schema: dict[str, Any]) -> str:
    return str(schema.get("description", "")).replace("|", "\\|").replace("\n", " ")


def _kind(schema: dict[str, Any]) -> str:
    """Return a schema's type in words, with a link where it is one of the page."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(one) for one in choices))
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    kind = schema.get("type", "any")
    return str(kind if isinstance(kind, str) else " or ".join(kind))
