"""What transformers says: the oracle of every end-to-end comparison, in fp32."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from diptych.runtime.model_digest import model_digest
from tests import bundled_oracle

ROOT = Path(__file__).parents[2]

MODEL = "SmolLM2-135M-Instruct"
PLAIN_LENGTHS = (
    *(1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100),
    *(127, 128, 129, 200, 255, 256, 257, 400, 511, 512, 513, 1000, 2047, 3000),
)
SHORT_LENGTHS = (1, 5, 15, 16, 17, 33, 48, 49, 65, 129, 257, 513)
MOST_TOKENS = 16
QUESTIONS = ("What is the capital of France?", "Count from one to ten.", "Write a haiku about the sea.")


def model_file() -> Path:
    """The bundled GGUF."""
    return bundled_oracle.path()


@functools.cache
def tokenizer() -> Any:
    from diptych.runtime.tokenizer.tokenizer import Tokenizer

    return Tokenizer.load(model_file())


def reference_model() -> Any:
    """transformers' own model of the same file, in fp32."""
    return bundled_oracle.model()


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of plain English of many lengths, block borders among them."""
    text = (ROOT / "LICENSE").read_text()
    ids = tokenizer().encode(text, add_special=False)
    ids = ids + ids  # the longest prompt is longer than the text
    return tuple(tuple(ids[37 * n : 37 * n + length]) for n, length in enumerate(PLAIN_LENGTHS))


def short_prompts() -> tuple[tuple[int, ...], ...]:
    """Those that take a slow machine no minute: at borders of blocks and chunks, and one longer than a large
    chunk.
    """
    return tuple(prompt for prompt in prompts() if len(prompt) in SHORT_LENGTHS)


@functools.cache
def chat_ids(question: str) -> tuple[int, ...]:
    """A chat's token ids by transformers' tokenizer and its rendering of the model's template."""
    turns = [{"role": "user", "content": question}]
    return tuple(
        bundled_oracle.tokenizer().apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    )


def greedy(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The tokens that transformers' `generate` appends, end-of-sequence excluded.

    A shorter answer is the beginning of a longer one, so that of `MOST_TOKENS` is asked for, once. It is kept
    between runs, since a slow oracle would be asked less: the file's name holds everything that an answer
    depends on, and deleting it costs a minute.
    """
    if max_tokens > MOST_TOKENS:
        raise ValueError(f"at most {MOST_TOKENS} tokens are asked of the oracle, not {max_tokens}")
    return _Answers.shared().of(prompt)[:max_tokens]


@functools.cache
def is_greedy(prompt: tuple[int, ...], answer: tuple[int, ...], max_tokens: int) -> bool:
    """Return whether the answer is that of `greedy`, by induction: transformers reads all of it in one step,
    and each token is the likeliest after those before it, the end included.
    """
    if (known := _Answers.shared().known(prompt)) is not None:
        return answer == known[:max_tokens]
    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        logits = reference_model()(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0]
    return without_end(logits.argmax(dim=-1).tolist()[:max_tokens]) == answer


class _Answers:
    """Answers by prompt, in memory and in a file of pytest's cache folder."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, list[int]] = json.loads(file.read_text()) if file.exists() else {}

    @classmethod
    @functools.cache
    def shared(cls) -> _Answers:
        versions = f"torch-{torch.__version__}-transformers-{version('transformers')}"
        return cls(ROOT / ".pytest_cache" / f"reference-{model_digest(model_file())[:16]}-{versions}.json")

    def known(self, prompt: tuple[int, ...]) -> tuple[int, ...] | None:
        found = self._known.get(_name_of(prompt))
        return None if found is None else tuple(found)

    def of(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        name = _name_of(prompt)
        if name not in self._known:
            self._known[name] = list(_generate(prompt, MOST_TOKENS))
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text(json.dumps(self._known))
        return tuple(self._known[name])


def _name_of(prompt: tuple[int, ...]) -> str:
    return f"{MOST_TOKENS}:{','.join(map(str, prompt))}"


def _generate(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference_model().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
    return without_end(out[0, len(prompt) :].tolist())


def without_end(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Drop the end-of-sequence token, which both sides report but neither shows."""
    eos = tokenizer().eos_token_ids
    return tuple(token_ids[:-1] if token_ids and token_ids[-1] in eos else token_ids)
