"""Folder of the peers, which may be deleted at any time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = Path("~/.cache/diptych/peers")


@dataclass(frozen=True)
class Places:
    """Paths below `root`, which is absolute. Nothing is made here."""

    root: Path

    @property
    def llama(self) -> Path:
        return self.root / "llama.cpp"

    @property
    def llama_tools(self) -> Path:
        """The environment with cmake and ninja."""
        return self.llama / "tools"

    @property
    def llama_binaries(self) -> Path:
        return self.llama / "build" / "bin"

    @property
    def vllm(self) -> Path:
        return self.root / "vllm"

    @property
    def vllm_cache(self) -> Path:
        """Compiled graphs: the second start is quicker than the first."""
        return self.root / "vllm-cache"

    @property
    def preloads(self) -> Path:
        """Libraries for LD_PRELOAD that the system does not have."""
        return self.root / "preloads"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def runs(self) -> Path:
        """Journals of measurements, by name."""
        return self.root / "runs"

    def gguf(self, kind: str) -> Path:
        return self.models / f"model-{kind}.gguf"

    def folder(self, kind: str) -> Path:
        """Return the place of a Hugging Face folder."""
        return self.models / f"hf-{kind}"
