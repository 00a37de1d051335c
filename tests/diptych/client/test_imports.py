"""The client is for back ends that have nothing else of Diptych."""

import subprocess
import sys

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
