"""`python -m diptych.runtime.grammar.check`: says of one grammar after another whether it can be compiled.

Runs as a child of the gateway, because nothing else ends a compilation that goes astray: llguidance bounds
most of its work but not all of it (the intersection of thirty patterns takes hours), and a thread cannot be
killed. Each check has its own limit of processor time, counted by the kernel, so that a loaded machine
refuses nothing; past it the kernel ends the process, and the gateway starts another.

Compiles for a vocabulary of single bytes, which is made in 2 ms: whether a grammar is right and possible
does not depend on the vocabulary.

Each way a frame is its length (4 bytes, little-endian) and so many bytes: of JSON `[kind, text]` in, of
UTF-8 out, empty if the grammar is fine.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import struct
import sys
from typing import BinaryIO, Final

from llguidance import LLTokenizer

from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from diptych.runtime.grammar.matcher import new_matcher

CPU_SECONDS: Final = 0.5
MEMORY_BYTES: Final = 2 << 30  # of address space
_CONTROL_TOKEN: Final = re.compile(r"<\[[0-9]+\]>")
LENGTH: Final = struct.Struct("<I")


def main() -> None:
    """Serve until the other end closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the gateway's business
    tokenizer = LLTokenizer("byte")
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (frame := _read(source)) is not None:
        kind, text = json.loads(frame)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        fault = _fault(Grammar(Kind(kind), text), tokenizer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(LENGTH.pack(len(fault)) + fault)
        sink.flush()


def _fault(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    if grammar.kind is Kind.LARK:
        # Control tokens of the model's, which the vocabulary of bytes has not: any other one will do.
        grammar = Grammar(grammar.kind, _CONTROL_TOKEN.sub("<[0]>", grammar.text))
    try:
        new_matcher(grammar, tokenizer)
    except BadGrammar as error:
        return str(error)
    return ""


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


if __name__ == "__main__":
    main()
