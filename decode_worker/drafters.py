"""The drafters of a decode worker, by its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_worker.best_drafter import BestDrafter
from decode_worker.config import DecodeSettings
from decode_worker.draft_lengths import StepCosts
from decode_worker.draft_model import DraftModel
from decode_worker.eagle_draft import EagleDraft
from decode_worker.eagle_tree import EagleTree
from decode_worker.grammar_draft import GrammarDraft
from decode_worker.medusa_draft import MedusaDraft
from decode_worker.prompt_lookup import PromptLookup
from decode_worker.speculation import Drafter, Speculation
from decode_worker.tree_plan import TreePlan
from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.settings import StartupError
from diptych.worker_process.loaded_engine import LoadedEngine

CHAINS = ("grammar", "lookup", "model", "eagle")
"""Drafters of chains, where no tree is asked for."""


class ImpossibleTree(StartupError):
    """A tree of drafts that nothing of this worker drafts or computes."""


def make_speculation(settings: DecodeSettings, engine: LoadedEngine, memory: KVMemory) -> Speculation | None:
    """Return the speculation that `settings` ask for, if any. Raises ImpossibleTree."""
    chain, plan = settings.draft_tokens, settings.tree_plan
    if plan is not None:
        _check_tree(plan, settings, engine)
    if chain == 0:
        return None
    drafters: dict[str, Drafter] = {"grammar": GrammarDraft(), "lookup": PromptLookup(chain)}
    depths: dict[str, Sequence[int]] = dict.fromkeys(CHAINS, range(1, chain + 1))
    if engine.draft is not None:
        drafters["model"] = DraftModel(engine.draft.runner, memory)
    if engine.eagle is not None and plan is not None:
        tree = EagleTree(engine.eagle.head, memory, plan)
        drafters["eagle"], depths["eagle"] = tree, tree.depths
    elif engine.eagle is not None:
        drafters["eagle"] = EagleDraft(engine.eagle.head, memory)
    if engine.heads is not None:
        heads = MedusaDraft(engine.heads, plan)
        drafters["heads"] = heads
        depths["heads"] = heads.depths[:chain] if plan is None else heads.depths
    return _speculation(settings, drafters, depths)


def _speculation(
    settings: DecodeSettings, drafters: Mapping[str, Drafter], depths: Mapping[str, Sequence[int]]
) -> Speculation:
    costs = StepCosts()
    return Speculation(
        BestDrafter(drafters, costs, depths),
        most=max(len(depths[name]) for name in drafters),
        tokens=settings.step_tokens,
        costs=costs,
    )


def _check_tree(plan: TreePlan, settings: DecodeSettings, engine: LoadedEngine) -> None:
    flag, heads = f"--speculative-tree {settings.speculative_tree}", engine.heads
    if heads is None and engine.eagle is None:
        raise ImpossibleTree(
            f"{flag}: trees are drafted by Medusa and EAGLE heads, and --speculative-model "
            f"{settings.speculative_model} is none"
        )
    if heads is not None and (depth := plan.depths[-1]) > len(heads):
        raise ImpossibleTree(
            f"{flag}: a tree of depth {depth} needs as many heads, and there are {len(heads)}"
        )
    if (why := engine.runner.lacks_trees()) is not None:
        raise ImpossibleTree(f"{flag}: {why}")
