"""Diptych, a gRPC service for LLM inference with prefill and decode in separate workers.

The client is imported at its first use, so that `import diptych` loads neither gRPC nor protobuf:

    from diptych import Client, chat

    with Client("127.0.0.1:50051") as client:
        print(client.generate(chat("What is the capital of France?")).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.client import AsyncClient, CallFailed, Client, chat

__all__ = ["AsyncClient", "CallFailed", "Client", "__version__", "chat"]

__version__ = "0.1.0"

_FROM_CLIENT = frozenset(__all__) - {"__version__"}


def __getattr__(name: str) -> Any:
    """Return an exported name of `diptych.client`. Raises AttributeError for any other one."""
    if name not in _FROM_CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("diptych.client"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
