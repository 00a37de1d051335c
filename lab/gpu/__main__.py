"""`python -m lab.gpu`: every section in one command, the peer included; results written as they come.

A section that fails leaves its error in the results and the others alone. `--only` names sections, for leases
that do not hold all of them; `--also` adds an earlier call's results to the targets, which are printed last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from lab.gpu import targets
from lab.gpu.results import Outcome, described, markdown, save
from lab.gpu.section import NO_DEVICE, Context, Figure, Section, Unmeasured

RESULTS = Path(__file__).parents[1] / "results"


def sections() -> dict[str, Section]:
    """Return all sections by name, in the order in which later ones need earlier ones."""
    from lab.gpu.adapted_steps import adapted_steps
    from lab.gpu.attention import attention
    from lab.gpu.batch_invariance import batch_invariance
    from lab.gpu.beside import beside, beside_4_bits, beside_experts, beside_fp8
    from lab.gpu.ceilings import ceilings
    from lab.gpu.faults import faults
    from lab.gpu.handoff import block_copies, handoff
    from lab.gpu.model_step import model_step
    from lab.gpu.operators import operators
    from lab.gpu.parts import parts
    from lab.gpu.quality import divergence, greedy_text
    from lab.gpu.quantised import quantised
    from lab.gpu.quantised_steps import expert_steps, quantised_steps
    from lab.gpu.recurrent import recurrent
    from lab.gpu.service import service
    from lab.gpu.shared_card import shared_card
    from lab.gpu.sharing import sharing
    from lab.gpu.short_prompts import short_prompts
    from lab.gpu.two_cards import two_cards
    from lab.gpu.verification import verification

    return {
        "ceilings": ceilings,
        "attention": attention,
        "operators": operators,
        "recurrent": recurrent,
        "model step": model_step,
        "parts": parts,
        "two cards": two_cards,
        "verification": verification,
        "adapted steps": adapted_steps,
        "short prompts": short_prompts,
        "quantised": quantised,
        "quantised steps": quantised_steps,
        "expert steps": expert_steps,
        "divergence": divergence,
        "greedy text": greedy_text,
        "batch invariance": batch_invariance,
        "sharing": sharing,
        "block copies": block_copies,
        "handoff": handoff,
        "service": service,
        "shared card": shared_card,
        "faults": faults,
        "beside": beside,
        "beside fp8": beside_fp8,
        "beside 4 bits": beside_4_bits,
        "beside experts": beside_experts,
    }


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 where there is no GPU or a section failed."""
    parser = argparse.ArgumentParser("python -m lab.gpu", description="Figures of a GPU, and peers'.")
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds: a look, no result")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="every line once, tiny, on the CPU (TRITON_INTERPRET=1): no figures",
    )
    parser.add_argument("--only", action="append", metavar="SECTION", help="may be repeated")
    parser.add_argument("--vllm", type=Path, metavar="COMMAND", help="vLLM's command; default: found")
    parser.add_argument(
        "--also", action="append", type=Path, default=[], metavar="JSON",
        help="results of an earlier call, whose figures count among the targets; may be repeated",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the two files")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() and not options.dry_run:
        print(NO_DEVICE, file=sys.stderr)
        return 1
    known = sections()
    chosen = options.only or list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(known)}")
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", torch.cuda.current_device())
    context = Context(device, options.quick, _say, vllm=options.vllm, dry=options.dry_run)
    earlier = [section for path in options.also for section in json.loads(path.read_text())["sections"]]
    machine = described(device)
    outcomes: list[Outcome] = []
    for name in (name for name in known if name in chosen):
        print(name, file=sys.stderr, flush=True)
        outcomes.append(run(name, known[name], context))
        if not options.dry_run:
            # After each: what stops the run loses one section only.
            save(options.results, machine, outcomes, earlier)
    print(markdown(machine, outcomes))
    print(targets.markdown([*earlier, *map(asdict, outcomes)]))
    return int(any(outcome.error is not None for outcome in outcomes))


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def run(name: str, section: Section, context: Context) -> Outcome:
    """Run a section to its end, or to its error with the figures that came before."""
    started, figures, error = time.monotonic(), list[Figure](), None
    try:
        for figure in section(context):
            figures.append(figure)
            context.say(line_of(figure))
    except Unmeasured as missing:
        error = str(missing)
    except Exception as failure:
        # Whatever it was: the other sections are worth having.
        error = f"{type(failure).__name__}: {failure}"[:2000]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Outcome(name, tuple(figures), error, time.monotonic() - started)


def line_of(figure: Figure) -> str:
    """Return a figure on one line, as it is printed when it is measured."""
    parts = [f"{figure.name}: {figure.value:.4g} {figure.unit}"]
    if figure.ratio is not None:
        parts.append(f"{figure.ratio:.2f} of {figure.against}")
    if figure.met is not None:
        parts.append(f"target {figure.target:g} {'met' if figure.met else 'missed'}")
    return ", ".join([*parts, *filter(None, [figure.note])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
