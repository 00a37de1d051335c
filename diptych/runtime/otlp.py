"""Common parts of traces, metrics and logs over OTLP: what the environment asks for, and the last message.

Imports no OpenTelemetry. Source: its "Environment Variable Specification" and "OTLP Exporter Configuration":
the variable of a signal stands against the general one, and an empty one counts as absent.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

FLUSH_S: Final = 2.0
"""Time that a collector which is gone may take of the end of a process."""


def sdk_disabled(environment: Mapping[str, str]) -> bool:
    """Return whether nothing is to be sent at all."""
    return environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def has_endpoint(signal: str, environment: Mapping[str, str]) -> bool:
    """Return whether the environment names an endpoint for "traces", "metrics" or "logs"."""
    return bool(_value(signal, "ENDPOINT", environment))


def protocol_of(signal: str, environment: Mapping[str, str]) -> str:
    """Return the protocol by which a signal is to be sent."""
    return _value(signal, "PROTOCOL", environment) or "grpc"


def exporter_module(protocol: str, module: str) -> Any:
    """Import the module of an exporter. Raises ImportError where there is none for the protocol.

    It takes a tenth of a second, and is needed where something is sent.
    """
    package = "http" if protocol == "http/protobuf" else protocol
    return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}")


def flush(work: Callable[[], object]) -> bool:
    """Do what may wait for a collector, for `FLUSH_S` at most; return whether it is done."""
    thread = threading.Thread(target=work, name="otlp-flush", daemon=True)
    thread.start()
    thread.join(FLUSH_S)
    return not thread.is_alive()


def _value(signal: str, what: str, environment: Mapping[str, str]) -> str:
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}")
    return next((text for name in names if (text := environment.get(name, "").strip())), "")
