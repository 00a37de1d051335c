"""Coverage-guided fuzzing of everything that reads a caller's bytes: `make fuzz-coverage`.

atheris (libFuzzer) steers the strategies of `hostile.py` towards code that was not reached before. Whatever
is sent, reading it gives a request or a `DiptychError`: any other exception ends the run and is printed. What
reached something new is kept in the corpus; `--keep` writes some of it into `found_inputs.txt`, which
`test_fuzz.py` sends through real sockets.

    python -m tests.end_to_end.public_api.coverage_guided CORPUS [--runs 200000] [--keep]
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris  # type: ignore[import-not-found]
from hypothesis import given, settings
from hypothesis import strategies as st

with atheris.instrument_imports(include=["gateway", "diptych.runtime.tokenizer", "diptych.runtime.grammar"]):
    from gateway.frontends.kserve.request import read_request
    from gateway.frontends.openai.chat_request import read_chat
    from gateway.frontends.openai.completions_request import read_completions
    from gateway.model.served_model import ServedModel
    from gateway.request.json_values import parse_body
    from gateway.request.validation import parse_message, parse_request

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import DiptychError
from diptych.v1 import inference_pb2 as pb
from tests.end_to_end import tiny_system
from tests.end_to_end.public_api import hostile
from tests.end_to_end.public_api.found_inputs import CHAT, COMPLETIONS, FILE, GENERATE, INFER, KEPT, Api

LONGEST = 2048
TOKEN_LIMIT = 512
READERS: dict[Api, Callable[[bytes], list[pb.GenerateRequest]]] = {
    GENERATE: lambda data: [parse_message(pb.GenerateRequest, data)],
    COMPLETIONS: lambda data: [builder.request for builder in read_completions(parse_body(data)).builders],
    CHAT: lambda data: [builder.request for builder in read_chat(parse_body(data)).builders],
    INFER: lambda data: [read_request(parse_message(oip.ModelInferRequest, data), streaming=True).request],
}


@st.composite
def messages(draw: st.DrawFn) -> tuple[Api, bytes]:
    """Draw an API, and what is sent to it."""
    match draw(st.integers(0, 5)):
        case 0 | 1:
            return GENERATE, draw(hostile.requests()).SerializeToString()
        case 2:
            return GENERATE, draw(hostile.wire())
        case 3:
            return INFER, draw(hostile.infers()).SerializeToString()
        case _:
            path, body = draw(hostile.bodies())
            return (CHAT if path == CHAT.path else COMPLETIONS), body


def target(model: ServedModel, seen: list[tuple[Api, bytes]] | None = None) -> Callable[[bytes], object]:
    """What is run for each input of the fuzzer's; ``seen`` hears of what it stands for."""

    @settings(deadline=None, database=None)
    @given(messages())
    def read(message: tuple[Api, bytes]) -> None:
        api, data = message
        if seen is not None:
            seen.append(message)
        with contextlib.suppress(DiptychError):
            for request in READERS[api](data):
                parse_request(request, model, token_limit=TOKEN_LIMIT)

    return read.hypothesis.fuzz_one_input


def keep(corpus: Path, model: ServedModel) -> None:
    """Write `KEPT` messages of every API, spread over their lengths, as base64, one a line."""
    seen: list[tuple[Api, bytes]] = []
    run = target(model, seen)
    for path in sorted(corpus.iterdir()):
        run(path.read_bytes())
    lines = []
    for api in READERS:
        mine = sorted({data for to, data in seen if to == api}, key=lambda data: (len(data), data))
        step = max(1, len(mine) // KEPT)
        lines += [f"{api.path} {base64.b64encode(data).decode()}" for data in mine[::step][:KEPT]]
    FILE.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Ends the process: libFuzzer does so itself after its last run."""
    parser = argparse.ArgumentParser(description="coverage-guided fuzzing of what reads requests")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--runs", type=int, default=200_000)
    parser.add_argument("--keep", action="store_true")
    given_ = parser.parse_args()
    given_.corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = ServedModel.load(tiny_system.write(Path(folder)), tiny_system.MODEL)
    if given_.keep:
        keep(given_.corpus, model)
        return
    options = [f"-runs={given_.runs}", f"-max_len={LONGEST}", "-len_control=0", "-timeout=20"]
    atheris.Setup([sys.argv[0], str(given_.corpus), *options], target(model))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
