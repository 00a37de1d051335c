"""Choice of the backend by flags."""

from __future__ import annotations

import argparse
import os
import ssl

from diptych.bench import options as flags
from diptych.bench.backends import Backend
from diptych.client.credentials import Access


def choose_backend(options: argparse.Namespace) -> Backend:
    """Return the backend that the flags ask for; its client library is imported now. Raises BadOptions."""
    name, asking = flags.backend_name(options), flags.asking(options)
    tls = _tls_context()  # for gRPC as well: it says nothing of a file that is no PEM
    try:
        access = Access.from_environment(options.api_key)
    except ValueError as error:
        raise flags.BadOptions(f"{'--api-key' if options.api_key else 'DIPTYCH_API_KEY'}: {error}") from None
    except OSError as error:
        raise flags.BadOptions(f"DIPTYCH_CA_FILE and its like: {error}") from None
    if name == "diptych":
        from diptych.bench.backends.grpc import GrpcBackend

        return GrpcBackend(options.address, asking, access)
    if name == "kserve":
        from diptych.bench.backends.kserve import KServeBackend

        return KServeBackend(options.address, asking, access)
    try:
        from diptych.bench.backends.openai_http import Endpoint, OpenAIBackend
    except ModuleNotFoundError as error:
        raise flags.BadOptions(f"--base-url needs {error.name}: pip install aiohttp") from None
    endpoint: Endpoint = "completions" if name == "openai" else "chat/completions"
    return OpenAIBackend(
        options.base_url,
        endpoint,
        asking,
        api_key=access.api_key,
        tls=tls,
        new_connections=options.new_connections,
    )


def _tls_context() -> ssl.SSLContext | None:
    """Return TLS from the variables that `diptych.client.credentials` names, or None. Raises BadOptions."""
    ca, cert, key = (os.environ.get(f"DIPTYCH_{name}_FILE") for name in ("CA", "CLIENT_CERT", "CLIENT_KEY"))
    if not (ca or cert):
        return None
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # an SSLError is one, too: a file that is no PEM
        raise flags.BadOptions(f"DIPTYCH_CA_FILE: {ca}: {error}") from None
    if cert:
        try:
            context.load_cert_chain(cert, key or None)
        except OSError as error:
            raise flags.BadOptions(f"DIPTYCH_CLIENT_CERT_FILE: {cert}: {error}") from None
    return context
