"""Builds the native CPU step (kernels/cpu) into a plain shared library.

Everything else about the package is in pyproject.toml. A machine without a C++ compiler still installs: the
engine then computes in torch, slower, and says so.

Environment: CXX chooses the compiler; DIPTYCH_NATIVE_SANITIZE=1 builds with AddressSanitizer and
UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError, PlatformError

SOURCES = Path("kernels/cpu")
COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
COMMON_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # g++ 12: in its own AVX-512 header
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
ISA_FLAGS = {
    "isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512.cpp": AVX512,
    "isa_avx512_vnni.cpp": [*AVX512, "-mavx512vnni"],
    "isa_avx512_bf16.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
    "isa_avx512_zen5.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
    "isa_amx.cpp": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
"""Flags of the files that one instruction set alone may run. No other file may have them: what the linker
merges must run everywhere.
"""


class BuildNativeStep(build_ext):
    """Compiles every source with its own flags and links one library without Python's ABI in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except (CompileError, LinkError, ExecError, PlatformError, OSError) as error:
            print(
                f"WARNING: the native CPU step was not built ({error}).\n"
                "WARNING: Diptych installs without it and computes in torch, several times slower.\n"
                "WARNING: install a C++17 compiler (g++ 11 or later, or clang) and install again.",
                file=sys.stderr,
            )

    def _build(self, ext: Extension) -> None:
        self.compiler.set_executables(
            compiler_so_cxx=[_compiler()], compiler_cxx=[_compiler()], linker_so_cxx=[_compiler(), "-shared"]
        )
        flags = COMMON_FLAGS + _sanitizer()

        def compiled(source: str) -> list[str]:
            own = ISA_FLAGS.get(Path(source).name, [])
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags + own, depends=ext.depends
            )

        # Compilers are processes of their own; the large files come first, so that none is left at the end.
        sources = sorted(ext.sources, key=lambda source: Path(source).name not in ISA_FLAGS)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = [name for names in pool.map(compiled, sources) for name in names]
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=[*_sanitizer(), "-pthread"], target_lang="c++"
        )


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _sanitizer() -> list[str]:
    if os.environ.get("DIPTYCH_NATIVE_SANITIZE") != "1":
        return []
    return [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        "-fno-omit-frame-pointer",
        "-g",
        "-O1",  # with -O3 it builds for a quarter of an hour and finds nothing more
    ]


def _sources() -> list[str]:
    names = sorted(path.name for path in SOURCES.glob("*.cpp"))
    if platform.machine().lower() not in ("x86_64", "amd64"):
        names = [name for name in names if name not in ISA_FLAGS]
    return [str(SOURCES / name) for name in names]


setup(
    ext_modules=[
        Extension(
            "kernels.cpu._step",
            _sources(),
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            optional=True,  # setuptools, too, must go on without it
        )
    ],
    cmdclass={"build_ext": BuildNativeStep},
)
