"""Engine that a worker serves with: its parts, and its descriptions for gateways and other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from diptych.engine.backend import WeighedBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.dtype import Precision
from diptych.engine.gpu_memory import GpuMemory
from diptych.engine.heads.medusa import MedusaHeads
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.loaded_model import Model
from diptych.engine.runner import Runner
from diptych.engine.step_work import WorkArithmetic
from diptych.engine.vision.encoder import ImageEncoder
from diptych.engine.vision.registry import rows_dtype
from diptych.image_spec import ImageSpec
from diptych.runtime.block_hash import HASH_VERSION
from diptych.runtime.kv_layout_name import draft_part
from diptych.worker_process.draft_chunks import DraftChunks, PromptDrafts
from diptych.worker_process.draft_loader import LoadedDraft
from diptych.worker_process.eagle_chunks import EagleChunks
from diptych.worker_process.eagle_loader import LoadedEagle
from diptych.worker_process.group.rank_group import RankGroup
from diptych.worker_process.worker_spec import EngineRecord
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint
from kvtransfer.drivers.handshake import Fingerprint


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model that has passed its self-test."""

    model: Model
    runner: Runner
    layout: KVLayout
    digest: str
    dtype: Precision
    parts: int = 1
    """Parts in which products are added."""
    whole_experts: bool = False
    """Parts have whole experts: products of experts are added in another order."""
    all_to_all: bool = False
    """Rows are sent to their experts: these are added in yet another order."""
    group: RankGroup | None = None
    """The other processes of this worker that compute; None where it is alone."""
    images: ImageSpec | None = None
    """Images as the model wants them, in a worker whose prompts take rows of them."""
    encoder: ImageEncoder | None = None
    """Encoder of images, in a worker that makes their rows itself, too."""
    draft: LoadedDraft | None = None
    """The draft model, whose keys and values are the second segment of each block of `layout`."""
    heads: MedusaHeads | None = None
    """Medusa heads, in a worker that decodes; they keep nothing in blocks."""
    eagle: LoadedEagle | None = None
    """A head over the model's features, whose keys and values are that segment."""
    memory: GpuMemory = field(default_factory=lambda: GpuMemory.of(torch.device("cpu")))
    """Uses of the GPU's memory until now."""

    @property
    def draft_chunks(self) -> PromptDrafts | None:
        """Return the part that runs the draft model, or the head, over prompts; None without one."""
        if self.eagle is not None:
            return EagleChunks(self.eagle.head)
        return None if self.draft is None else DraftChunks(self.draft.runner)

    @property
    def embedding_fingerprint(self) -> EmbeddingFingerprint | None:
        """Properties that an encode worker must share to send rows to this one; None where it takes none."""
        if self.images is None:
            return None
        return EmbeddingFingerprint(self.digest, self.images.family, _dtype_name(rows_dtype(self.dtype)))

    @property
    def unbroken_rows(self) -> int:
        """Most tokens of an image that a chunk takes whole, beyond its budget; 0 where images are divided."""
        return self.images.rows_per_tile if self.images is not None and self.images.whole else 0

    @property
    def record(self) -> EngineRecord:
        """See `ServedEngine.record`."""
        fingerprint, rows = self.fingerprint, self.embedding_fingerprint
        windows = self.layout.windows
        return EngineRecord(
            model_digest=fingerprint.model_digest,
            dtype=fingerprint.dtype,
            kv_dtype=fingerprint.kv_dtype,
            kv_layout=fingerprint.cache_layout,
            block_size=fingerprint.block_size,
            max_context=self.model.shape.max_context,
            num_threads=self.runner.threads,
            draft_digest=fingerprint.draft_digest,
            window_blocks=0 if windows is None else windows.tables,
            window_places=0 if windows is None else windows.kept(fingerprint.block_size),
            image_rows="" if rows is None else rows.format,
            encodes=int(self.encoder is not None),
        )

    @property
    def computes(self) -> str:
        """See `ServedEngine.computes`."""
        return self.model.computes

    @property
    def device_type(self) -> str:
        """See `ServedEngine.device_type`."""
        return self.model.device.type

    def count_steps(self, on_step: Callable[[float, int], None]) -> None:
        """See `ServedEngine.count_steps`."""
        self.runner.on_step = on_step

    def count_work(self, on_work: Callable[[int, int], None]) -> None:
        """Call `on_work(bytes, operations)` for each step on a GPU from now on; not for models of latents."""
        backend = self.model.backend
        if not isinstance(backend, WeighedBackend) or self.model.shape.latent is not None:
            return
        arithmetic = WorkArithmetic(self.model.shape, self.layout, backend.weight_bytes, backend.expert_bytes)

        def count(sequences: Sequence[SequenceStep]) -> None:
            work = arithmetic.of(sequences)
            on_work(work.read_bytes, work.operations)

        self.runner.on_work = count

    def yield_cores(self) -> None:
        """See `ServedEngine.yield_cores`."""
        self.runner.cpu.yield_()

    @property
    def fingerprint(self) -> Fingerprint:
        """Properties that another worker must share to exchange blocks with this one, but for its drafter."""
        parts = [self.layout.name, self.model.shape.served_factors]
        if (draft := self.layout.draft) is not None:
            parts.append(draft_part(draft.name, _dtype_name(draft.dtype)))
        if self.model.own_order:
            parts.append("batch-invariant")
        layout = "+".join(filter(None, parts))
        return Fingerprint(
            model_digest=self.digest,
            dtype=self.dtype,
            kv_dtype=_dtype_name(self.layout.dtype),
            kv_layout=layout,
            block_size=self.layout.block_size,
            num_layers=self.layout.num_layers,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            hash_version=HASH_VERSION,
            tensor_parallel=1 if self.group is None else self.group.size,
            sum_parts=self.parts,
            expert_parallel=self.whole_experts,
            expert_all_to_all=self.all_to_all,
            draft_digest=next((one.digest for one in (self.draft, self.eagle) if one is not None), ""),
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
