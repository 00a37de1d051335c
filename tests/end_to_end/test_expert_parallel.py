"""Workers of several processes that share experts and layers: the tokens of one process of the same parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig

from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end import reference, tiny_model
from tests.end_to_end.rank_processes import Degrees, alone, answer, processes, resumed, serving
from tests.end_to_end.stack import Stack

TOKENS = 20
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 100))]
EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 3}
LATENT: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "num_hidden_layers": 3,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}


def degrees(tensor: int, pipeline: int = 1, *, experts: bool = False) -> Degrees:
    chosen = {"tensor-parallel": tensor, "pipeline-parallel": pipeline}
    return {**chosen, "expert-parallel": True} if experts else chosen


def listed(stack: Stack) -> list[pb.WorkerInfo]:
    """Return the workers as the gateway knows them, each after a heartbeat."""
    with grpc.insecure_channel(stack.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return list(stub.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers)


def test_two_stages_of_two_ranks_to_one_process_are_one_process(tmp_path: Path) -> None:
    """Experts dealt whole, computed by the native step where it was built."""
    model = tiny_model.write(tmp_path, config_class=MixtralConfig, **EXPERTS)
    expected = alone(model, 2, PROMPTS, TOKENS, whole_experts=True)
    with serving(model, degrees(2, 2, experts=True), degrees(1, experts=True)) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        (load,) = [worker.load for worker in listed(stack) if worker.role == pb.WORKER_ROLE_PREFILL]
        assert [rank.pid for rank in load.ranks] == processes(stack, "prefill")
        assert load.stages == 2
        assert all(rank.weight_bytes for rank in load.ranks)


@pytest.mark.full
def test_a_stream_outlives_a_rank_of_the_last_stage(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path, config_class=MixtralConfig, **EXPERTS)
    expected = alone(model, 2, PROMPTS, TOKENS, whole_experts=True)
    with serving(model, degrees(2, experts=True), degrees(2, 2, experts=True)) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        before = processes(stack, "decode")
        assert resumed(stack, PROMPTS[1], TOKENS, victim=3) == expected[1]
        stack.wait_idle(120)
        assert not {*before} & {*processes(stack, "decode")}


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("experts", [True, False], ids=["whole", "sliced"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, 1), (2, 1)),
        ((2, 1), (1, 1)),
        ((2, 1), (4, 1)),
        ((4, 1), (2, 1)),
        ((1, 2), (2, 2)),
        ((1, 3), (1, 1)),
    ],
)
def test_any_degrees_to_any_others_are_one_process(
    tmp_path: Path, prefill: tuple[int, int], decode: tuple[int, int], experts: bool, transport: str
) -> None:
    model = tiny_model.write(tmp_path, config_class=MixtralConfig, **EXPERTS)
    parts = max(prefill[0], decode[0])
    experts = experts and parts > 1
    expected = alone(model, parts, PROMPTS, TOKENS, whole_experts=experts)
    more = {"sum-parts": parts}
    of_prefill, of_decode = ({**degrees(*of, experts=experts), **more} for of in (prefill, decode))
    with serving(model, of_prefill, of_decode, transport) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        assert stack.metric("prefill", "diptych_kv_transfer_duration_seconds_count") >= len(PROMPTS)
        for victim in range(decode[0] * decode[1]):
            assert resumed(stack, PROMPTS[1], TOKENS, victim) == expected[1]
            stack.wait_idle(120)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config_class", "sizes"), [(GptOssConfig, EXPERTS), (DeepseekV3Config, LATENT)], ids=["gpt-oss", "mla"]
)
def test_other_families_are_one_process(
    tmp_path: Path, config_class: type[Any], sizes: dict[str, Any]
) -> None:
    model = tiny_model.write(tmp_path, config_class=config_class, **sizes)
    expected = alone(model, 2, PROMPTS, TOKENS, whole_experts=True)
    with serving(model, degrees(2, experts=True), degrees(2, 2, experts=True)) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        assert resumed(stack, PROMPTS[1], TOKENS, victim=3) == expected[1]


@pytest.mark.full
@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), (1, 1)), ((1, 1), (1, 3)), ((2, 2), (1, 2))])
def test_the_bundled_model_in_stages_is_one_process(
    prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    prompts = [list(reference.prompts()[index]) for index in (5, 12, 21)]
    expected = alone(reference.model_file(), max(prefill[0], decode[0]), prompts, TOKENS)
    with serving("bundled", degrees(*prefill), degrees(*decode)) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in prompts] == expected
        assert resumed(stack, prompts[2], TOKENS, victim=decode[0] * decode[1] - 1) == expected[2]
