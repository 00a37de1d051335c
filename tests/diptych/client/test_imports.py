"""Modules that imports of the client load: back ends have nothing else of Diptych."""

import subprocess
import sys

import pytest

import diptych

LOADED = """
import sys
before = set(sys.modules)
import diptych.client
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - set(sys.stdlib_module_names)))
"""


def test_the_client_imports_grpc_and_protobuf_only() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"diptych", "google", "grpc"} <= loaded
    assert not loaded & {
        "torch",
        "transformers",
        "redis",
        "numpy",
        "aiohttp",
        "gateway",
        "diptych.runtime",
        "diptych.engine",
    }
    # Cython gives compiled modules a name of its own; grpc looks for its optional parts.
    extra = {name for name in loaded if not name.startswith(("_", "grpc_"))}
    assert extra - {"cython_runtime", "typing_extensions"} == {"diptych", "google", "grpc"}


LIGHT = """
import sys
import diptych, diptych.engine
before = {name.partition(".")[0] for name in sys.modules} & {"google", "grpc", "numpy", "torch"}
from diptych import *
print(sorted(before), Client.__name__, AsyncClient.__name__, CallFailed.__name__, chat("x"), __version__)
"""


def test_the_package_exports_the_client_at_its_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    turns = [{"role": "user", "content": "x"}]
    assert done.stdout.strip() == f"[] Client AsyncClient CallFailed {turns} {diptych.__version__}"
    assert {*diptych.__all__} <= {*dir(diptych)}
    with pytest.raises(AttributeError, match="no_such_name"):
        diptych.no_such_name  # noqa: B018
