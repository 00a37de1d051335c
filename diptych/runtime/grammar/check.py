"""`python -m diptych.runtime.grammar.check`: says of one grammar after another whether it can be compiled.

Runs as a child of the gateway, because nothing else ends a compilation that goes astray: llguidance bounds
most of its work but not all of it (the intersection of thirty patterns takes hours), and a thread cannot be
killed. Each check has its own limit of processor time, counted by the kernel, so that a loaded machine
refuses nothing; past it the kernel ends the process, and the gateway starts another.

Compiles for a vocabulary of single bytes, which is made in 2 ms: whether a grammar is right and possible
does not depend on the vocabulary.

A question is a frame of JSON, `[kind, text]`; an answer one of UTF-8, empty if the grammar is fine.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Final

from llguidance import LLTokenizer

from diptych.runtime.bounded_child import bound_process, cpu_limit, frame, read_frame
from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from diptych.runtime.grammar.matcher import new_matcher

CPU_SECONDS: Final = 0.5
MEMORY_BYTES: Final = 2 << 30  # of address space
_CONTROL_TOKEN: Final = re.compile(r"<\[[0-9]+\]>")


def main() -> None:
    """Serve until the other end closes."""
    bound_process(MEMORY_BYTES)
    tokenizer = LLTokenizer("byte")
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (question := read_frame(source)) is not None:
        kind, text = json.loads(question)
        with cpu_limit(CPU_SECONDS):
            fault = _fault(Grammar(Kind(kind), text), tokenizer)
        sink.write(frame(fault.encode()))
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


if __name__ == "__main__":
    main()
