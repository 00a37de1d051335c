"""Settings of the decode worker."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from decode_worker.kv_events.endpoint import parse_endpoint
from decode_worker.local_schedule import LocalBounds, default_chunks
from decode_worker.tree_plan import TreePlan
from decode_worker.tree_plans import parse_plan
from diptych.runtime.settings import setting
from diptych.worker_process.config import WorkerSettings

CPU_POOL_MIB = 1024
_DRAFT_TOKENS = 4
"""Drafted tokens with a draft model, where no number is given."""


class DecodeSettings(WorkerSettings):
    """Run a decode worker: it owns KV blocks, and computes all its sequences' answers token by token."""

    program: ClassVar[str] = "decode"

    kv_memory_mib: Annotated[int | None, Field(ge=1)] = setting(
        None, "Memory of the KV block pool in MiB; default: 1024, on a GPU what is free.", section="KV cache"
    )
    kv_blocks: Annotated[int, Field(ge=0)] = setting(
        0, "Blocks of the KV block pool; 0 takes as many as --kv-memory-mib holds.", section="KV cache"
    )
    kv_events: str = setting(
        "",
        "Publish what the prefix cache holds, with token ids, for routers of others: ipc://FILE, or "
        "tcp://127.0.0.1:PORT?password-file=FILE.",
        section="KV events",
    )
    kv_events_topic: str = setting("kv-events", "Topic of these events.", section="KV events")
    kv_events_rank: Annotated[int, Field(ge=0, le=1024)] = setting(
        0,
        "Number of this worker among those of its system: each has an endpoint of its own.",
        section="KV events",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = setting(
        0.9, "Share of a GPU's memory that this worker may take, KV blocks included.", section="KV cache"
    )
    max_batch: Annotated[int, Field(ge=1, le=1024)] = setting(
        64, "Sequences of a decode step.", section="Scheduling"
    )
    decode_pacing: Annotated[float, Field(ge=1, le=10)] = setting(
        1.3,
        "Time between starts of decode steps, in lengths of a step, while prompts queue for shared cores or "
        "for the same GPU; 1 starts the next step at once.",
        section="Scheduling",
    )
    decode_pacing_max: Annotated[float, Field(ge=1, le=10)] = setting(
        3.0,
        "Value that --decode-pacing grows to while a prompt waits, from half a second to a second; no more "
        "than --decode-pacing lets it never grow.",
        section="Scheduling",
    )
    max_local_prefill_tokens: Annotated[int, Field(ge=0, le=65536)] = setting(
        256,
        "New tokens of a prompt up to which this worker computes it itself, instead of a prefill worker; "
        "0 computes none.",
        section="Local prefill",
    )
    max_fallback_prefill_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = setting(
        2048,
        "New tokens up to which it does so while no prefill worker is ready.",
        section="Local prefill",
    )
    local_prefill_chunk: Annotated[int, Field(ge=0, le=65536)] = setting(
        0,
        "Tokens of such prompts in a step beside running sequences; 0 takes 16 on a CPU, 256 on a GPU.",
        section="Local prefill",
    )
    speculative_tokens: Annotated[int, Field(ge=0, le=15)] = setting(
        0,
        "Most tokens that are drafted for each sequence and checked in one step; 0 drafts none, or up to 4 "
        "with --speculative-model.",
        section="Speculative decoding",
    )
    speculative_max_step_tokens: Annotated[int, Field(ge=1, le=1024)] = setting(
        8,
        "Tokens of a step, drafts included, up to which its sequences get drafts.",
        section="Speculative decoding",
    )

    speculative_tree: str = setting(
        "",
        "Trees that heads draft: branches at each depth, as in 4,2,1, or where EAGLE heads are sure, as in "
        "dynamic:20 or dynamic:NODES,DEPTH,WIDTH; empty drafts chains.",
        section="Speculative decoding",
    )

    @field_validator("speculative_tree")
    @classmethod
    def _tree_is_a_tree(cls, value: str) -> str:
        parse_plan(value)
        return value

    @field_validator("kv_events")
    @classmethod
    def _events_have_an_endpoint(cls, value: str) -> str:
        if value:
            parse_endpoint(value)
        return value

    @model_validator(mode="after")
    def _trees_are_of_heads(self) -> Self:
        if self.speculative_tree and self.speculative_model is None:
            raise ValueError(f"--speculative-tree {self.speculative_tree} needs heads (--speculative-model)")
        return self

    @property
    def draft_tokens(self) -> int:
        """Most tokens of a chain that a step drafts for a sequence."""
        return self.speculative_tokens or (_DRAFT_TOKENS if self.speculative_model is not None else 0)

    @property
    def drafting_flags(self) -> str:
        """See `WorkerSettings.drafting_flags`."""
        tokens = f"--speculative-tokens {self.speculative_tokens}" if self.speculative_tokens else ""
        return super().drafting_flags or tokens

    @property
    def tree_plan(self) -> TreePlan | None:
        """Plan of trees of drafts; None where drafts are chains."""
        return parse_plan(self.speculative_tree)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step up to which there are drafts; if it is not configured, a whole tree's at least."""
        if "speculative_max_step_tokens" in self.model_fields_set:
            return self.speculative_max_step_tokens
        plan = self.tree_plan
        return max(self.speculative_max_step_tokens, 1 + (0 if plan is None else len(plan.depths)))

    @property
    def decodes(self) -> bool:
        """See `WorkerSettings.decodes`."""
        return True

    def num_blocks(self, bytes_per_block: int) -> int:
        """Return the blocks of the pool as configured, or of the default on a CPU; at least one."""
        return self.kv_blocks or max(1, ((self.kv_memory_mib or CPU_POOL_MIB) << 20) // bytes_per_block)

    def local_bounds(self, device_type: str) -> LocalBounds:
        """Return the most tokens of prompts that this worker computes itself."""
        beside, alone = default_chunks(device_type)
        chunk = self.local_prefill_chunk or beside
        return LocalBounds(
            short=self.max_local_prefill_tokens,
            fallback=max(self.max_local_prefill_tokens, self.max_fallback_prefill_tokens),
            chunk=chunk,
            idle_chunk=max(chunk, alone),
        )

    @property
    def recorded_prompt_tokens(self) -> int:
        """See `WorkerSettings.recorded_prompt_tokens`; a worker without chunks in its steps records none."""
        chunks = self.max_local_prefill_tokens or self.max_fallback_prefill_tokens or self.draft_tokens
        return self.prompt_graph_tokens if chunks else 0

    @property
    def step_pacing(self) -> tuple[float, float]:
        """See `WorkerSettings.step_pacing`."""
        return self.decode_pacing, self.decode_pacing_max

    @property
    def pool_chosen(self) -> bool:
        """True if the size of the pool is configured."""
        return bool(self.kv_blocks or self.kv_memory_mib)
