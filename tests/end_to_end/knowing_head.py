"""An EAGLE head in the authors' form that knows some texts of the tiny model: its drafts are right there.

Everything of it is random but its output matrix, which is solved for what it gives at the places of these
texts. A draft's first token is right, the others are anything: it is never asked for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from diptych.engine.batch import SequenceStep
from diptych.engine.heads.eagle_files import read_eagle
from diptych.engine.heads.feature_head import HeadStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from tests.diptych.worker_process.test_eagle_loader import write_eagle
from tests.end_to_end import tiny_model

MOST_TOKENS = 60
"""Tokens that a head of 64 numbers can know."""


def write(folder: Path, model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> Path:
    """Write a head that knows the first greedy `tokens` after each of `prompts`, MOST_TOKENS in all; return
    `folder`.
    """
    assert tokens * len(prompts) <= MOST_TOKENS
    write_eagle(folder, model)
    loaded = load_model(model, "fp32", backend="torch")
    runner = Runner(loaded, 1)
    assert runner.give_features((loaded.shape.num_layers,)) is None
    embed = runner.embedding
    assert embed is not None
    head = read_eagle(folder, loaded.shape, embed, lambda: embed, torch.float32)
    rows, said = [], []
    for prompt in prompts:
        ids = [*prompt, *greedy(model, prompt, tokens)]
        blocks = head.kv_layout(16).blocks_for(len(ids))
        step = SequenceStep(KVMemory(loaded.kv_layout(16), blocks), range(blocks), 0, ids, wants_logits=True)
        features = runner.step_and_sample([step], [None]).features
        assert features is not None
        before = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        before[len(prompt)] = 0.0  # the prompt's last feature stays with its worker
        given = head.step(KVMemory(head.kv_layout(16), blocks), [HeadStep(range(blocks), 0, ids, before)])
        rows.append(given[len(prompt) : -1].double())
        said += ids[len(prompt) + 1 :]
    wanted = torch.zeros(len(said), loaded.shape.vocab_size, dtype=torch.double)
    wanted[range(len(said)), said] = 1000.0
    output = (torch.linalg.pinv(torch.cat(rows)) @ wanted).T.float().contiguous()
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": output}, file)
    return folder


def greedy(model: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' greedy tokens; the end of sequence is not taken for one."""
    oracle, ids = tiny_model.oracle(model), list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(oracle(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
