"""Grammars in the engine loops of both workers: slow ones, bad ones, and those of resumed requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample
from diptych.runtime.grammar.grammar import BadGrammar
from diptych.worker.v1 import work_pb2
from diptych.worker_process.grammar_masks import Grammars, GrammarState
from prefill_worker.request import State
from tests.diptych.worker_process.both_workers import VOCABULARY, House, greedy, house, layout, model
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

END = 0
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
COUNT = 12
LONG = 32
LOCAL = work_pb2.LOCAL_PREFILL_FALLBACK
GRAMMAR = work_pb2.Grammar(kind=work_pb2.Grammar.KIND_REGEX, text="([a-f][g-z])*")
SHORT = work_pb2.Grammar(kind=work_pb2.Grammar.KIND_REGEX, text="[a-f][g-z][0-9]")


class Letters:
    """A character for each token of the small model's vocabulary."""

    bos_token_id, eos_token_id, is_tokenizer_wrapper = None, END, True
    special_token_ids = (END,)
    tokens = (b"</s>", *(bytes([code]) for code in range(ord("0"), ord("0") + VOCABULARY - 1)))

    def __call__(self, text: str) -> list[int]:
        return [ord(char) - ord("0") + 1 for char in text]


class LetterGrammars(Grammars):
    """Compiles for `Letters`, when it may."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._vocabulary = LLTokenizer(Letters())  # type: ignore[arg-type]
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.broken = False

    def start_now(self, message: work_pb2.Grammar, delivered: Iterable[int] = ()) -> GrammarState:
        self.may_compile.wait(20)
        if self.broken:
            raise BadGrammar("is not for this vocabulary")
        return super().start_now(message, delivered)


@cache
def alone(text: str, count: int, mark: int | None = None) -> tuple[int, ...]:
    """Return the model's output under the grammar, computed alone and at once.

    With a `mark` the grammar begins after it, and until then all but the end of sequence may come.
    """
    state = LetterGrammars().start_now(work_pb2.Grammar(kind=work_pb2.Grammar.KIND_REGEX, text=text))
    runner, blocks = Runner(model(), 1), layout().blocks_for(len(PROMPT) + count)
    memory, table = KVMemory(layout(), blocks), list(range(blocks))
    new, start, out = list(PROMPT), 0, list[int]()
    while len(out) < count and not state.complete:
        logits = runner.step([SequenceStep(memory, table, start, new, wants_logits=True)])
        start += len(new)
        free = mark is not None and mark not in out
        rules = ((END,), None) if free else ((), state)
        (sampled,) = sample(logits, [SampleRow(SamplingParams(temperature=0.0), PROMPT, out, *rules)])
        assert isinstance(sampled, Sampled)
        out.append(sampled.token_id)
        if sampled.token_id == END:
            break
        if not free:
            state.accept(sampled.token_id)
        new = [sampled.token_id]
    return tuple(out)


def grammars_of(made: House) -> tuple[LetterGrammars, LetterGrammars]:
    """The prefill worker's and the decode worker's."""
    ours = LetterGrammars(), LetterGrammars()
    made.prefills[0].loop.requests.grammars = ours[0]
    made.decodes[0].loop.requests.grammars = ours[1]
    return ours


def asked(number: int, count: int, grammar: work_pb2.Grammar = GRAMMAR, **rest: object) -> work_pb2.Work:
    message = work((f"r{number}", 1), PROMPT, count, stop=(END,), **rest)
    message.sampling.grammar.CopyFrom(grammar)
    return message


@pytest.mark.parametrize("late", ["neither", "prefill", "decode"])
async def test_a_request_waits_for_its_grammar(late: str) -> None:
    async with house("shared_memory") as made:
        for_prefill, for_decode = grammars_of(made)
        held = {"prefill": [for_prefill], "decode": [for_decode], "neither": []}[late]
        for one in held:
            one.may_compile.clear()
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], asked(1, COUNT))
        free = gateway.start(made.decodes[0], made.prefills[0], work(("free", 1), PROMPT, COUNT))
        await free.ended.wait()
        assert tuple(free.tokens) == greedy(PROMPT, COUNT), "who has no grammar does not wait"
        assert not held or not heard.tokens
        if late == "prefill":
            states = [one.state for one in made.prefills[0].loop.requests.all()]
            assert states == [State.QUEUED], "no blocks wait for a grammar"
        for one in held:
            one.may_compile.set()
        await heard.ended.wait()
        assert tuple(heard.tokens) == alone(GRAMMAR.text, COUNT) != tuple(free.tokens)
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("width", [0, 3])
async def test_local_prompt_holds_no_blocks_before_its_grammar_is_compiled(width: int) -> None:
    async with house("shared_memory") as made:
        (_, for_decode), decode, gateway = grammars_of(made), made.decodes[0], Gateway(made)
        for_decode.may_compile.clear()
        rest = {"choices": range(max(width, 1)), "sampling": {"beam_width": width}}
        heard = gateway.start_local(decode, asked(1, COUNT, local=LOCAL, **rest))
        free = gateway.start_local(decode, work(("free", 1), PROMPT, COUNT, local=LOCAL))
        await free.ended.wait()
        assert tuple(free.tokens) == greedy(PROMPT, COUNT)
        assert (len(decode.loop.local), decode.handoff.stats().grants) == (1, 0)
        for_decode.may_compile.set()
        await heard.ended.wait()
        assert width or tuple(heard.tokens) == alone(GRAMMAR.text, COUNT)
        assert set(heard.terminal_messages) == {"decode finished"}
        await gateway.close()
        assert await made.empty() == []


async def test_local_prompt_fails_with_its_grammar() -> None:
    async with house("shared_memory") as made:
        grammars_of(made)[1].broken = True
        gateway = Gateway(made)
        heard = gateway.start_local(made.decodes[0], asked(1, COUNT, local=LOCAL))
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode FAILURE_REASON_NO_VALID_TOKEN"]
        assert len(made.decodes[0].loop.local) == 0
        await gateway.close()
        assert await made.empty() == []


async def test_local_prompt_continues_its_grammar_after_any_token() -> None:
    whole = alone(GRAMMAR.text, COUNT)
    async with house("shared_memory", blocks=64) as made:
        grammars_of(made)
        gateway = Gateway(made)
        for delivered in range(COUNT):
            message = asked(delivered, COUNT, delivered=whole[:delivered], local=LOCAL)
            heard = gateway.start_local(made.decodes[0], message)
            await heard.ended.wait()
            assert tuple(heard.tokens) == whole[delivered:]
        await gateway.close()


async def test_a_complete_output_ends_without_an_end_of_sequence() -> None:
    async with house("shared_memory") as made:
        grammars_of(made)
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], asked(1, COUNT, SHORT, min_tokens=COUNT))
        await heard.ended.wait()
        assert tuple(heard.tokens) == alone(SHORT.text, COUNT)
        assert len(heard.tokens) == 3
        assert heard.terminal_messages == ["decode finished"]
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize(
    ("text", "count", "reason"),
    [
        ("[a-f]", 1, work_pb2.FINISH_REASON_STOP),  # what the prefill worker drew is the whole of it
        (SHORT.text, 3, work_pb2.FINISH_REASON_STOP),
        (SHORT.text, 2, work_pb2.FINISH_REASON_LENGTH),
        (GRAMMAR.text, 4, work_pb2.FINISH_REASON_LENGTH),  # might end here, and might go on
    ],
)
@pytest.mark.parametrize("width", [0, 3])
async def test_an_output_complete_at_max_tokens_finishes_with_stop(
    text: str, count: int, reason: work_pb2.FinishReason, width: int
) -> None:
    grammar = work_pb2.Grammar(kind=work_pb2.Grammar.KIND_REGEX, text=text)
    async with house("shared_memory") as made:
        grammars_of(made)
        gateway = Gateway(made)
        ranks = range(max(width, 1))
        message = asked(1, count, grammar, choices=ranks, sampling={"beam_width": width})
        heard = gateway.start(made.decodes[0], made.prefills[0], message)
        await heard.ended.wait()
        assert len(heard.outputs[0]) == count
        for rank, output in heard.outputs.items():
            assert heard.reasons[rank] == (work_pb2.FINISH_REASON_STOP if END in output else reason)
        if not width:
            # Who has all of it, and not the word that it is all, hears the same and no token more.
            message = asked(2, count, grammar, delivered=heard.tokens)
            again = gateway.start(made.decodes[0], made.prefills[0], message)
            await again.ended.wait()
            assert (again.tokens, again.reasons) == ([], {0: reason})
        await gateway.close()
        assert await made.empty() == []


async def test_a_resumed_output_continues_its_grammar_after_any_token() -> None:
    whole = alone(GRAMMAR.text, COUNT)
    async with house("shared_memory", blocks=64) as made:
        grammars_of(made)
        gateway = Gateway(made)
        for delivered in range(1, COUNT):
            message = asked(delivered, COUNT, delivered=whole[:delivered])
            heard = gateway.start(made.decodes[0], made.prefills[0], message)
            await heard.ended.wait()
            assert tuple(heard.tokens) == whole[delivered:]
        await gateway.close()
        assert await made.empty() == []


def after(mark: int, text: str = SHORT.text, **more: object) -> work_pb2.Grammar:
    """Return a grammar that begins after the token `mark`."""
    span = work_pb2.ReasoningSpan(ends=[work_pb2.ReasoningSpan.Mark(ids=[mark])], **({"open": True} | more))
    return work_pb2.Grammar(kind=work_pb2.Grammar.KIND_REGEX, text=text, after=span)


def reasoning_mark() -> tuple[int, int]:
    """Return a token that the free output has, and the length of what that has with its first one."""
    free = alone(SHORT.text, LONG, VOCABULARY)  # a mark that never comes
    at = next(place for place in range(3, LONG) if free[place] not in free[:place])
    return free[at], at + 1


@pytest.mark.parametrize("backend", ["torch", "device", "native"])
async def test_a_grammar_begins_after_reasoning_wherever_the_output_is_resumed(backend: str) -> None:
    """Before, within and after the reasoning: the rest is what an undisturbed run has."""
    mark, reasoning = reasoning_mark()
    whole = alone(SHORT.text, LONG, mark)
    assert whole[reasoning - 1] == mark
    assert len(whole) == reasoning + 3
    async with house("shared_memory", blocks=64, backend=backend) as made:
        grammars_of(made)
        gateway = Gateway(made)
        for delivered in range(len(whole)):
            message = asked(delivered, LONG, after(mark), delivered=whole[:delivered])
            heard = gateway.start(made.decodes[0], made.prefills[0], message)
            await heard.ended.wait()
            assert tuple(heard.tokens) == whole[delivered:], delivered
            assert heard.reasons == {0: work_pb2.FINISH_REASON_STOP}
        # Control: a worker that takes the grammar to hold from the first token on writes something else.
        heard = gateway.start(made.decodes[0], made.prefills[0], asked(99, LONG, SHORT))
        await heard.ended.wait()
        assert tuple(heard.tokens) != whole
        await gateway.close()
        assert await made.empty() == []


async def test_reasoning_cut_by_its_length_does_not_begin_the_grammar() -> None:
    mark, reasoning = reasoning_mark()
    async with house("shared_memory") as made:
        grammars_of(made)
        gateway = Gateway(made)
        for count in (1, 3, reasoning):  # the last token is the mark: nothing is left for the answer
            heard = gateway.start(made.decodes[0], made.prefills[0], asked(count, count, after(mark)))
            await heard.ended.wait()
            assert tuple(heard.tokens) == alone(SHORT.text, LONG, mark)[:count]
            assert heard.reasons == {0: work_pb2.FINISH_REASON_LENGTH}
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("broken", ["prefill", "decode"])
async def test_a_grammar_that_one_worker_cannot_compile_fails_the_request(broken: str) -> None:
    async with house("shared_memory") as made:
        for_prefill, for_decode = grammars_of(made)
        (for_prefill if broken == "prefill" else for_decode).broken = True
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], asked(1, COUNT))
        await heard.ended.wait()
        assert heard.terminal_messages == [f"{broken} FAILURE_REASON_NO_VALID_TOKEN"]
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("late", ["prefill", "decode"])
async def test_a_cancel_during_compilation_releases_all_blocks(late: str) -> None:
    async with house("shared_memory") as made:
        for_prefill, for_decode = grammars_of(made)
        waiting = for_prefill if late == "prefill" else for_decode
        waiting.may_compile.clear()
        gateway, decode = Gateway(made), made.decodes[0]
        gateway.start(decode, made.prefills[0], asked(1, COUNT))
        if late == "decode":
            await until(lambda: decode.pool.available() < decode.pool.total)
        await asyncio.sleep(0.1)  # by now the handoff is complete, if it can be
        # Blocks would lie idle while the prefill worker compiles: it asks for none.
        assert (decode.pool.available() < decode.pool.total) == (late == "decode")
        decode.loop.requests.cancel(("r1", 1))
        made.prefills[0].loop.requests.cancel(("r1", 1))
        waiting.may_compile.set()
        await gateway.close()
        assert await made.empty() == []
