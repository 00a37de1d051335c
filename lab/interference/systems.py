"""The systems that are compared: whole Diptychs that differ only in who may compute on which core."""

from __future__ import annotations

from diptych.runtime.python_module import module_command
from lab.peers.servers import Server

APART, LENDING, WIDE = "apart", "lending", "wide"


def systems(dtype: str, model: str, cores: int) -> dict[str, Server]:
    """Return the systems by name.

    `apart` splits the cores between the phases for good, `lending` is what a user gets, and in `wide` either
    phase has all cores, so that it can be compared only while the other is idle.
    """
    half = max(1, cores // 2)
    own = ("--prefill-threads", str(cores - half), "--decode-threads", str(half))  # chosen: nothing is lent
    both = ("--prefill-threads", str(cores), "--decode-threads", str(cores))
    return {
        name: _diptych(name, dtype, model, flags)
        for name, flags in ((APART, own), (LENDING, ()), (WIDE, both))
    }


def _diptych(name: str, dtype: str, model: str, flags: tuple[str, ...]) -> Server:
    return Server(
        name=f"diptych-{name}",
        family="diptych",
        precision=dtype,
        arguments=(
            *module_command("diptych"),
            *("up", "--dtype", dtype, "--model", model, *flags),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
    )
