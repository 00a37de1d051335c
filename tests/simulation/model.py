"""The simulated model, whose every token is a function of all that attention reads, and its oracle.

The "keys and values" of a token are eight bytes: a hash of the token and of the entry before it. The logits
of a position are a hash of all entries up to it, read block by block through the block table, as attention
does. So a block that was freed too early, written by another process, shared by mistake or copied wrongly
changes the next token, and the stream differs from `oracle`, which knows no blocks.

A model with a window keeps the entries in windowed blocks as well, and reads those of the last tokens there.
One with recurrent layers reads the entry before a step in a page and leaves that of its last token there: an
entry is a hash of the one before it, so that a token that was added twice, or to another, makes another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from decode_worker.sequence import DecodeSequence
from diptych.engine.backend import Backend
from diptych.engine.batch import AbortWords, SequenceStep, StepOutput, check_batch
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.gpu_memory import GpuMemory
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.state_groups import StateGroups
from diptych.engine.kv.state_layout import StateLayout
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, choice_seed
from diptych.image_spec import ImageSpec
from diptych.runtime.block_hash import HASH_VERSION
from diptych.worker_process.adapter_store import AdapterStore, _Loaded
from diptych.worker_process.loaded_engine import LoadedEngine
from diptych.worker_process.worker_spec import EngineRecord
from gateway.adapters.adapter import Adapter
from kvtransfer.drivers.handshake import Fingerprint
from kvtransfer.transports.base import CPU
from prefill_worker.encoder.engine import LoadedEncoder
from tests.simulation.images import SPEC, SimulatedEncoder, fingerprint, step_tokens, with_rows

BLOCK_SIZE = 4
MAX_CONTEXT = 256
VOCABULARY = 49152  # of the bundled tokenizer
FIRST_TOKEN, TOKENS = 1000, 40  # the model generates only these
POISON = 2000  # a prompt that begins with it kills the worker that computes it
DIGEST = "d" * 64
LAYOUT = KVLayout(1, 1, 1, BLOCK_SIZE, torch.float32)
ENTRY = LAYOUT.bytes_per_block // BLOCK_SIZE
WINDOW = 10
"""Tokens that the layers with a window see, where the model has some: two, in blocks of their own."""
WINDOW_LAYOUT = replace(LAYOUT, num_layers=3, windows=WindowGroups(WINDOW, 1, 2, ((1, 0), (0, 0), (2, 0))))
STATE_LAYOUT = replace(
    LAYOUT,
    num_layers=2,
    windows=StateGroups(2, 1, 2, ((0, 0), (1, 0))),
    states=StateLayout(((1, ((2,),)),), 64),
)

FINGERPRINT = Fingerprint(
    model_digest=DIGEST,
    dtype="fp32",
    kv_dtype="float32",
    kv_layout=LAYOUT.name,
    block_size=BLOCK_SIZE,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    hash_version=HASH_VERSION,
)
WINDOW_FINGERPRINT = replace(FINGERPRINT, kv_layout=WINDOW_LAYOUT.name, num_layers=3)
STATE_FINGERPRINT = replace(FINGERPRINT, kv_layout=STATE_LAYOUT.name, num_layers=2)


def extend(entries: bytearray, token_ids: Sequence[int], adapter: bytes = b"") -> None:
    """Append the entries of tokens; an adapter, by its digest, makes other ones of the same tokens."""
    last = bytes(entries[-ENTRY:])
    for token in token_ids:
        last = xxh3_64_digest(last + token.to_bytes(4, "little") + adapter)
        entries += last


_POISONED = bytearray()
extend(_POISONED, [POISON])


ADAPTERS = {name: Adapter(name, name.encode() * 32, f"/{name}") for name in "AB"}
LOAD_S = 0.08


class SimulatedAdapterStore(AdapterStore):
    """The workers' store; loading takes a while and no file."""

    async def _load(self, digest: bytes, path: Path) -> object:
        try:
            await asyncio.sleep(LOAD_S)
            self._loaded[digest] = _Loaded(digest)
            return digest
        finally:
            del self._loading[digest]


@dataclass(frozen=True)
class _Shape:
    max_context: int = MAX_CONTEXT
    vocab_size: int = VOCABULARY


@dataclass(frozen=True)
class SimulatedModel:
    device: torch.device = CPU
    shape: _Shape = _Shape()
    computes: str = "integers"
    backend: None = None

    def kv_memory(self, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Return memory of the process' own."""
        return KVMemory(layout, num_blocks)


class Rows(list[int]):
    """Rows of logits, of which some can be taken, as of a tensor."""

    def __getitem__(self, places: Any) -> Any:
        """Return one, a slice, or those at a list of places."""
        return [self[place] for place in places] if isinstance(places, list) else super().__getitem__(places)


class SimulatedRunner:
    """Stand-in for `diptych.engine.runner.Runner`; logits are integers, one a row."""

    threads = 1
    launches = False
    completions = None
    recorded_prompts = 0

    def __init__(
        self,
        watch: Callable[[SequenceStep], None],
        poisoned: Callable[[], None],
        *,
        mixes_chunks: bool = True,
        ranks: int = 1,
    ) -> None:
        """Compute as so many `ranks`: of several, a step leaves what each has to write in `writes`."""
        self._ranks = ranks
        self.writes: list[list[Callable[[], None]]] = []
        self.mixes_chunks = mixes_chunks
        self.on_step: Callable[[float, int], None] | None = None
        self.cpu = CpuPolicy(cast(Backend, None), self.threads)  # no process lends cores here
        self.watch = watch
        self.poisoned = poisoned
        self._slots: dict[int, bytes] = {}

    def allow_adapters(self, slots: int, max_rank: int) -> None:
        """Allow them; None says that nothing is lacking."""

    def place_adapter(self, slot: int, prepared: bytes | None) -> None:
        """Put the adapter of this digest into a slot, or empty it."""
        if prepared is None:
            self._slots.pop(slot, None)
        else:
            self._slots[slot] = prepared

    def step_and_sample(
        self, sequences: Sequence[SequenceStep], sample_rows: object, abort: AbortWords | None = None
    ) -> StepOutput:
        """Return the rows as logits; nothing is sampled here."""
        rows = Rows(self.step(sequences, abort))
        return StepOutput([None] * len(rows), rows)  # type: ignore[arg-type]

    def samples_on_device(self, row: object) -> bool:
        """Return False: nothing is launched here."""
        return False

    def plan_decode(self, max_batch: int, block_size: int, windows: WindowGroups | None = None) -> int:
        """Return 0: nothing is recorded."""
        return 0

    def prepare_decode(self, memory: KVMemory) -> None: ...

    def step(self, sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> Any:
        """Write the entries of the new tokens and return a hash of all entries for each row of logits."""
        check_batch(sequences, VOCABULARY, self._slots)
        rows: list[int] = []
        for number, sequence in enumerate(sequences):
            if abort is not None and abort.is_aborted(number):
                rows += [0] * sequence.logit_rows
                continue
            entries = self.read(sequence)
            adapter = b"" if sequence.adapter is None else self._slots[sequence.adapter]
            extend(entries, step_tokens(sequence.token_ids, sequence.embeddings), adapter)
            self.write(sequence, entries)
            rows += self.logits(sequence, entries)
        return rows

    def read(self, sequence: SequenceStep) -> bytearray:
        """Return the entries before the step's."""
        return _read(sequence, sequence.start)

    def write(self, sequence: SequenceStep, entries: bytearray) -> None:
        """Write those of the step."""
        if self._ranks == 1:
            self.watch(sequence)
            _write(sequence, entries)
        else:
            lanes = (range(rank, ENTRY, self._ranks) for rank in range(self._ranks))
            self.writes.append([partial(self._write_lanes, sequence, entries, own) for own in lanes])

    def logits(self, sequence: SequenceStep, entries: bytearray) -> list[int]:
        """Return the rows of logits after a step's tokens, whose entries are the last ones."""
        if entries.startswith(_POISONED):
            self.poisoned()
        ends = range(len(entries) - ENTRY * (sequence.logit_rows - 1), len(entries) + 1, ENTRY)
        return [xxh3_64_intdigest(entries[:end]) for end in ends if sequence.wants_logits]

    def take_writes(self) -> list[Callable[[], None]]:
        """Return what each rank writes of the step that was computed last."""
        steps, self.writes = self.writes, []
        return [partial(_call_all, of_rank) for of_rank in zip(*steps, strict=True)]

    def _write_lanes(self, sequence: SequenceStep, entries: bytearray, lanes: Sequence[int]) -> None:
        self.watch(sequence)
        _write(sequence, entries, lanes)


def _call_all(acts: Sequence[Callable[[], None]]) -> None:
    for act in acts:
        act()


def _read(sequence: SequenceStep, tokens: int) -> bytearray:
    entries = bytearray()
    for block in sequence.block_table[: LAYOUT.blocks_for(tokens)]:
        entries += sequence.memory.block_bytes(block)
    del entries[tokens * ENTRY :]
    recurrent = sequence.memory.layout.states is not None
    for table in sequence.window_tables:
        if recurrent:
            entries[len(entries) - ENTRY :] = b"" if not tokens else _state(sequence, table, tokens - 1)
            continue
        for position in range(max(0, tokens - WINDOW + 1), tokens):
            entries[position * ENTRY : (position + 1) * ENTRY] = _lane(sequence, table, position)
    return entries


def _state(sequence: SequenceStep, table: Sequence[int], position: int) -> memoryview:
    """Return the state in the page of the token at `position`."""
    return sequence.memory.block_bytes(table[position // BLOCK_SIZE - sequence.window_first])[:ENTRY]


def _lane(sequence: SequenceStep, table: Sequence[int], position: int) -> memoryview:
    """Return the entry at `position` in a windowed table."""
    block = sequence.memory.block_bytes(table[position // BLOCK_SIZE - sequence.window_first])
    at = position % BLOCK_SIZE * ENTRY
    return block[at : at + ENTRY]


def _write(sequence: SequenceStep, entries: bytearray, lanes: Sequence[int] = range(ENTRY)) -> None:
    """Write the entries of a step's tokens; a rank writes some bytes of each, as it has some heads."""
    size = LAYOUT.bytes_per_block
    for place in range(sequence.start // BLOCK_SIZE, LAYOUT.blocks_for(len(entries) // ENTRY)):
        begin = max(place * size, sequence.start * ENTRY)
        piece = entries[begin : (place + 1) * size]
        block = sequence.memory.block_bytes(sequence.block_table[place])
        for lane in lanes:
            block[begin - place * size + lane : begin - place * size + len(piece) : ENTRY] = piece[
                lane::ENTRY
            ]
    recurrent = sequence.memory.layout.states is not None
    for table in sequence.window_tables:
        for position in range(sequence.start, len(entries) // ENTRY):
            if recurrent:
                _state(sequence, table, position)[:] = entries[position * ENTRY : (position + 1) * ENTRY]
                continue
            _lane(sequence, table, position)[:] = entries[position * ENTRY : (position + 1) * ENTRY]


def sample(logits: Sequence[int], rows: Sequence[SampleRow]) -> list[Sampled]:
    """Stand in for `diptych.engine.sampling.sample`: a token for each row, by all that a row depends on."""
    return [Sampled(_draw(digest, row), None) for digest, row in zip(logits, rows, strict=True)]


def _draw(digest: int, row: SampleRow) -> int:
    params = row.params
    seed = 0 if params.greedy else params.seed
    penalties = (params.frequency_penalty, sorted(row.output_ids)) if params.frequency_penalty else ()
    name = f"{digest}/{seed}/{len(row.output_ids)}/{len(row.prompt_ids)}/{penalties}"
    drawn = xxh3_64_intdigest(name.encode())
    while (token := FIRST_TOKEN + drawn % TOKENS) in row.suppress:
        drawn += 1
    return token


class SimulatedDrafter:
    """Stand-in for `decode_worker.prompt_lookup.PromptLookup`: two thirds of its drafts are right."""

    def __init__(self, most: int) -> None: ...

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the tokens to come, some of them wrong; a wrong one changes what is right after it."""
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _draft(self, sequence: DecodeSequence, count: int) -> Sequence[int]:
        row, text = sequence.next_row, bytearray()
        extend(text, [*row.prompt_ids, *row.output_ids])
        draft: list[int] = []
        while len(draft) < count:
            digest = xxh3_64_intdigest(text)
            output = [*row.output_ids, *draft]
            token = _draw(digest, SampleRow(row.params, row.prompt_ids, output))
            draft.append(token if digest % 3 else FIRST_TOKEN)
            extend(text, draft[-1:])
        return draft

    def rests(self, sequence: DecodeSequence) -> bool:
        """Return False: it never rests."""
        return False


NO_GPU = GpuMemory.of(torch.device("cpu"))


@dataclass(frozen=True)
class SimulatedEngine:
    """Stand-in for `diptych.worker_process.loaded_engine.LoadedEngine`, whose descriptions it has."""

    runner: SimulatedRunner
    model: SimulatedModel = SimulatedModel()
    layout: KVLayout = LAYOUT
    digest: str = DIGEST
    dtype: str = "fp32"
    memory: GpuMemory = NO_GPU
    fingerprint: Fingerprint = FINGERPRINT
    images: ImageSpec | None = None
    encoder: SimulatedEncoder | None = None
    group: Any = None
    parts: int = 1
    draft: None = None
    draft_chunks: None = None
    heads: None = None
    eagle: None = None
    unbroken_rows = LoadedEngine.unbroken_rows
    embedding_fingerprint = LoadedEngine.embedding_fingerprint
    record = LoadedEngine.record
    computes = LoadedEngine.computes
    device_type = LoadedEngine.device_type
    count_steps = LoadedEngine.count_steps
    count_work = LoadedEngine.count_work
    yield_cores = LoadedEngine.yield_cores


def image_parts(own_encoder: bool, grouped: bool) -> dict[str, Any]:
    """Return what the engine of a prefill worker has for images; groups have nothing."""
    if grouped:
        return {}
    return {"images": SPEC, "encoder": SimulatedEncoder() if own_encoder else None}


def encode_engine() -> LoadedEncoder:
    """Return the encoder of an encode worker."""
    rows = fingerprint(DIGEST)
    record = EngineRecord(
        model_digest=DIGEST,
        dtype=rows.dtype,
        block_size=BLOCK_SIZE,
        max_context=MAX_CONTEXT,
        num_threads=1,
        image_rows=rows.format,
        encodes=1,
    )
    return LoadedEncoder(SimulatedEncoder(), rows, CPU, 1, record)


@dataclass(frozen=True)
class RequestSampling:
    """The sampling of a request."""

    temperature: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0

    def params(self, choice: int) -> SamplingParams:
        """Return the parameters of one choice, as the workers derive them."""
        seed = choice_seed(self.seed, choice) if self.temperature else self.seed
        return SamplingParams(
            temperature=self.temperature, seed=seed, frequency_penalty=self.frequency_penalty
        )


@lru_cache(maxsize=256)
def oracle(
    prompt: tuple[int, ...],
    sampling: RequestSampling,
    choice: int,
    stop_ids: frozenset[int],
    limits: tuple[int, int],
    adapter: str = "",
) -> tuple[int, ...]:
    """Return a choice's output, computed alone, at once and without blocks; `limits`: min and max tokens."""
    params, entries, output = sampling.params(choice), bytearray(), list[int]()
    digest = ADAPTERS[adapter].digest if adapter else b""
    extend(entries, with_rows(prompt), digest)
    while len(output) < limits[1]:
        suppress = tuple(stop_ids) if len(output) < limits[0] else ()
        token = _draw(xxh3_64_intdigest(entries), SampleRow(params, prompt, output, suppress))
        output.append(token)
        if token in stop_ids:
            break
        extend(entries, [token], digest)
    return tuple(output)
