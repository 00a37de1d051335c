"""Tokens a second of one stream with and without drafts, by turns: python -m lab.speculation --help.

Two systems run side by side and answer the same request one after the other, so that what else the machine
does meets both. Every answer is compared: it has to be the same text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.client import AsyncClient
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder
from tests.end_to_end.stack import Stack, running_stack

PEOPLE = ("Ada Lovelace, 36, London", "Alan Turing, 41, Wilmslow", "Grace Hopper, 85, Arlington")
COPY = (
    "Repeat this text word for word, twice:\n\nThe quick brown fox jumps over the lazy dog while seventeen "
    "purple elephants discuss the price of tea in the harbour of Antwerp. All of them are wet, for the "
    "harbour master has closed his window and reads the newspaper of last Wednesday.\n\nText:\n"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 4,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "full_name": {"type": "string", "maxLength": 30},
                    "age_in_years": {"type": "integer", "maximum": 120},
                    "city_of_residence": {"type": "string", "maxLength": 20},
                    "is_still_employed": {"type": "boolean"},
                },
                "required": ["full_name", "age_in_years", "city_of_residence", "is_still_employed"],
            },
        }
    },
    "required": ["people"],
}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy": (COPY, {}),
    "schema": (
        "List these people as JSON: " + "; ".join(PEOPLE) + "; Edsger Dijkstra, 72, Nuenen.\n",
        {"json_schema": json.dumps(SCHEMA)},
    ),
    "prose": ("Once upon a time in a small village by the sea", {}),
}


LAYERS, DRAFT_LAYERS, HIDDEN = 16, 2, 1024
DAMPED = 0.15
"""Factor on what the layers behind the draft's add: without it random layers would say anything."""


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a Llama with random weights and its first layers as a model of their own; return both folders."""
    tokenizer = byte_level(vocab_size=320)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 8,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight *= DAMPED
            layer.mlp.down_proj.weight *= DAMPED
    for name, layers in (("model", LAYERS), ("draft", DRAFT_LAYERS)):
        write_folder(folder / name, tokenizer)
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
        model.save_pretrained(folder / name)
    return folder / "model", folder / "draft"


async def timed(stack: Stack, task: str, max_tokens: int) -> tuple[float, tuple[int, ...], Any]:
    """Return tokens a second after the first one, the tokens, and the usage."""
    prompt, options = TASKS[task]
    async with AsyncClient(stack.address) as client:
        tokens: list[int] = []
        first, usage = 0.0, None
        async for chunk in client.stream(
            prompt, max_tokens=max_tokens, temperature=0.0, timeout_s=300, **options
        ):
            first = first or time.perf_counter()
            tokens += chunk.token_ids
            usage = chunk.usage or usage
        return (len(tokens) - 1) / (time.perf_counter() - first), tuple(tokens), usage


async def turns(plain: Stack, drafting: Stack, tasks: Sequence[str], rounds: int, max_tokens: int) -> None:
    """Print the ratios of all rounds for each task."""
    for task in tasks:
        ratios, rates, shares = [], [], []
        for _ in range(rounds):
            slow, text, _ = await timed(plain, task, max_tokens)
            fast, drafted, usage = await timed(drafting, task, max_tokens)
            if text != drafted:
                print(f"{task}: the texts differ")
            ratios.append(fast / slow)
            rates.append((slow, fast))
            if usage is not None and usage.drafted_tokens:
                shares.append(usage.accepted_draft_tokens / usage.drafted_tokens)
        print(
            f"{task}: {len(text)} tokens, {statistics.median(r[0] for r in rates):.1f} tokens/s without, "
            f"{statistics.median(r[1] for r in rates):.1f} with drafts; by turns "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"drafts right {statistics.median(shares) if shares else 0:.2f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--speculative-tokens", default="7")
    parser.add_argument("--speculative-model")
    parser.add_argument(
        "--pair", type=Path, help="Folder for a random model, to be drafted for by its first layers."
    )
    parser.add_argument("flags", nargs="*", help="Flags of both systems, after --.")
    options = parser.parse_args()
    drafts = ["--speculative-tokens", options.speculative_tokens]
    if options.pair:
        model, draft = write_pair(options.pair)
        options.flags += ["--model", str(model)]
        options.speculative_model = str(draft)
    if options.speculative_model:
        drafts += ["--speculative-model", options.speculative_model]
    with running_stack(*options.flags) as plain, running_stack(*options.flags, *drafts) as drafting:
        asyncio.run(turns(plain, drafting, options.tasks, options.rounds, options.max_tokens))


if __name__ == "__main__":
    main()
