"""Tokens a second of clients with LoRA adapters and without, by turns: python -m lab.adapter_streams --help.

One system has the base model and adapters with random numbers. Its clients ask the base alone, and then the
adapters in turn, each for the same number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from diptych.client import AsyncClient
from diptych.runtime.settings import resolve_model
from lab.adapters import TARGETS
from tests.adapters import write_adapter
from tests.end_to_end.stack import Stack, running_stack

PROMPT = 64
"""Tokens of a prompt."""


def write_adapters(folder: Path, model: Path, count: int, rank: int, targets: Sequence[str]) -> list[str]:
    """Write adapters of `rank` for the projections `targets` of a folder's model; return their flags."""
    named = (model.parent, model.name) if model.suffix == ".gguf" else (model, None)
    base = AutoModelForCausalLM.from_pretrained(named[0], gguf_file=named[1], dtype=torch.float32)
    modules = [f"{target}_proj" for target in targets]
    flags = []
    for number in range(count):
        path = write_adapter(
            folder / f"a{number}", base, seed=number, rank=rank, targets=modules, strength=0.05
        )
        flags.append(f"--lora=a{number}={path}")
    return flags


async def rate(stack: Stack, clients: int, count: int, adapters: int) -> float:
    """Return the tokens a second of `clients` streams at once; stream n has adapter n modulo `adapters`."""
    async with AsyncClient(stack.address) as client:

        async def stream(number: int) -> int:
            prompt = [7 + (number * PROMPT + place) % 1000 for place in range(PROMPT)]
            lora, tokens = f"a{number % adapters}" if adapters else "", 0
            async for chunk in client.stream(
                prompt, max_tokens=count, temperature=0.0, ignore_eos=True, timeout_s=300, lora=lora
            ):
                tokens += len(chunk.token_ids)
            return tokens

        began = time.perf_counter()
        made = await asyncio.gather(*(stream(number) for number in range(clients)))
        return sum(made) / (time.perf_counter() - began)


async def turns(stack: Stack, options: argparse.Namespace) -> str:
    """Return the ratios of all rounds, in words; a first one only warms up."""
    ratios, rates = list[float](), list[float]()
    for number in range(options.rounds + 1):
        plain = await rate(stack, options.clients, options.max_tokens, 0)
        adapted = await rate(stack, options.clients, options.max_tokens, options.adapters)
        if number:
            ratios.append(adapted / plain)
            rates.append(plain)
    return (
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) of "
        f"{statistics.median(rates):.0f} tokens/s"
    )


def main() -> None:
    """Measure and print a line for each set of targets."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("flags", nargs="*", help="Flags of the system, after --.")
    options = parser.parse_args()
    model = resolve_model(options.model)
    for name in options.targets:
        with tempfile.TemporaryDirectory() as folder:
            adapters = write_adapters(Path(folder), model, options.adapters, options.rank, TARGETS[name])
            flags = ("--model", str(model), "--max-loras", str(options.adapters), *adapters, *options.flags)
            with running_stack(*flags) as stack:
                print(f"{name}: {asyncio.run(turns(stack, options))}", flush=True)


if __name__ == "__main__":
    main()
