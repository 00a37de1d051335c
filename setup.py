"""Build of the native CPU step (kernels/cpu) as a plain shared library, and tag of the wheel that holds it.

Everything else about the package is in pyproject.toml. A machine without a C++ compiler still installs: the
engine then computes in torch, slower, and logs it.

The library has no Python ABI, so that one wheel serves every Python: its tag is py3-none-manylinux_2_XX, XX
by the newest symbols of glibc and libstdc++ that the library needs. A wheel without it is py3-none-any.

Environment: CXX chooses the compiler; DIPTYCH_NATIVE_CACHE names a folder that keeps built libraries by the
digest of sources, flags and compiler; DIPTYCH_NATIVE_SANITIZE=1 builds with AddressSanitizer and
UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
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


LINK_FLAGS = ["-pthread"]
GLIBC_OF_GLIBCXX = {19: 17, 22: 24, 24: 27, 25: 28, 28: 31, 29: 34, 30: 35, 32: 38, 33: 39}
"""Symbol version 3.4.X of libstdc++, and the minor version of glibc in the first distributions with it."""


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
        target = Path(self.get_ext_fullpath(ext.name))
        kept = _kept_library(ext)
        if kept is not None and kept.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, target)
            return
        self._compile(ext, target)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)

    def _compile(self, ext: Extension, target: Path) -> None:
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
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=[*_sanitizer(), *LINK_FLAGS], target_lang="c++"
        )


class NativeWheel(bdist_wheel):
    """A wheel for this platform and every Python if the native step was built, else one for all platforms."""

    def run(self) -> None:
        if not self.skip_build:
            self.run_command("build")
        self.root_is_pure = not self._library.exists()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        if not self._library.exists():
            return ("py3", "none", "any")
        return ("py3", "none", _platform_tag(self._library, super().get_tag()[2]))

    @property
    def _library(self) -> Path:
        return Path(self.get_finalized_command("build").build_lib, "kernels", "cpu", "_step.so")


def _platform_tag(library: Path, plain: str) -> str:
    """Return the manylinux tag (PEP 600) of the oldest glibc that `library` runs with.

    `plain`, such as linux_x86_64, is returned for other systems and C libraries, and for a libstdc++ that is
    newer than the table above.
    """
    content = library.read_bytes()
    needed = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", content)]
    runtime = max(map(int, re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", content)), default=0)
    served = [glibc for symbols, glibc in GLIBC_OF_GLIBCXX.items() if symbols >= runtime]
    if not plain.startswith("linux_") or not needed or not served:
        return plain
    return plain.replace("linux", f"manylinux_2_{max(*needed, min(served))}", 1)


def _kept_library(ext: Extension) -> Path | None:
    """Return where DIPTYCH_NATIVE_CACHE keeps what these sources, flags and this compiler give."""
    folder = os.environ.get("DIPTYCH_NATIVE_CACHE")
    if not folder:
        return None
    compiler = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(compiler)
    digest.update(repr((COMMON_FLAGS, ISA_FLAGS, LINK_FLAGS, _sanitizer(), platform.machine())).encode())
    for name in sorted([*ext.sources, *ext.depends]):
        digest.update(name.encode() + Path(name).read_bytes())
    return Path(folder, f"{digest.hexdigest()[:24]}.so")


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
    cmdclass={"build_ext": BuildNativeStep, "bdist_wheel": NativeWheel},
)
