"""Start of a program in a process of its own, with the packages of this installation or working tree.

A process is started with this file as its script, isolated from the current directory (`python -P`):

    python -P …/diptych/runtime/python_module.py MODULE [ARGUMENT …]

`PYTHONPATH` precedes site-packages, so that a user's `gateway.py` or `kernels.py` there would be imported
instead of ours. A finder in front of `sys.meta_path` therefore resolves our own top-level names from the
folder that holds this `diptych`, and leaves all other names alone. `DIPTYCH_TREE` names another working tree
to take them from, for tools that compare trees; a package missing there is never taken from elsewhere.

Without MODULE the script prints the folder of each of our packages, one `NAME PATH` a line.
Only the standard library is imported here: as a script the file runs before any package is found.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

PACKAGES = ("diptych", "gateway", "prefill_worker", "decode_worker", "kvtransfer", "kernels")
TREE_VARIABLE = "DIPTYCH_TREE"
USAGE_ERROR = 2
Word = TypeVar("Word")

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path("diptych/runtime/python_module.py")
_EXTRAS = {"triton": "gpu", "transformers": "gpu", "matplotlib": "bench"}


class _PackageFinder:
    """Finder of `names` in the folder `root` and nowhere else; other names are left to the next finder."""

    def __init__(self, root: Path, names: frozenset[str], explicit: bool) -> None:
        self.root = root
        self._names = names
        self._explicit = explicit

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a top-level package of ours. Raises ModuleNotFoundError if an explicit tree
        lacks it.
        """
        if path is not None or name not in self._names:
            return None
        spec = PathFinder.find_spec(name, [str(self.root)], target)
        if spec is None and self._explicit:
            raise ModuleNotFoundError(f"{TREE_VARIABLE}={self.root} has no package {name}", name=name)
        if spec is not None and spec.loader is None:
            # A namespace's own path object would be computed again from sys.path, another folder's included.
            spec.submodule_search_locations = list(spec.submodule_search_locations or ())
        return spec


def tree_root() -> Path:
    """Return the folder that programs start from: `DIPTYCH_TREE`, else the one that holds this package."""
    chosen = os.environ.get(TREE_VARIABLE)
    return Path(chosen).resolve() if chosen else _ROOT


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs `module` from `tree_root()`; its arguments are appended."""
    script = tree_root() / _SCRIPT
    return (sys.executable, "-P", str(script if script.exists() else _ROOT / _SCRIPT), module)


def module_arguments(command: Sequence[Word]) -> Sequence[Word]:
    """Return what follows the module's name in a command that begins with `module_command`."""
    return command[len(module_command("")) :]


def find_packages_here(*others: str) -> None:
    """Resolve our packages, and the top-level names `others`, from `tree_root()` from now on."""
    explicit = bool(os.environ.get(TREE_VARIABLE))
    finder = _PackageFinder(tree_root(), frozenset((*PACKAGES, *others)), explicit)
    sys.meta_path[:] = [finder, *(f for f in sys.meta_path if type(f).__name__ != _PackageFinder.__name__)]


def explain_import_failure(error: ImportError | AttributeError) -> str | None:
    """Return one sentence for an import that failed for its environment; None for any other failure.

    Named are a file on PYTHONPATH or in the current directory that shadows a dependency, and the extra to
    install where a dependency is missing.
    """
    owner = getattr(error.obj, "__name__", None) if isinstance(error, AttributeError) else error.name
    top = str(owner or "").partition(".")[0]
    if not top or top in PACKAGES:
        return None
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    user_folders = {os.path.realpath(entry) for entry in _user_folders()}
    if file and os.path.realpath(file).removesuffix("/__init__.py").rpartition("/")[0] in user_folders:
        return (
            f"{file} shadows the package {top!r}, which Diptych needs: "
            "rename it or leave its folder out of PYTHONPATH"
        )
    if not isinstance(error, ModuleNotFoundError) or sys.modules.get(top) is not None:
        return None
    return (
        f"the package {top!r} is not installed; this command needs it: "
        f"pip install 'diptych[{_EXTRAS.get(top, 'server')}]'"
    )


def _user_folders() -> list[str]:
    return [os.curdir, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _main(arguments: Sequence[str]) -> None:
    """Run the module that the first argument names, as `python -m` does; without one print the origins."""
    root = tree_root()
    if not (root / "diptych").is_dir():
        print(f"diptych: {TREE_VARIABLE}={root} holds no diptych", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    if not arguments:
        find_packages_here()
        for name in PACKAGES:
            spec = find_spec(name)
            print(name, *(spec.submodule_search_locations or () if spec else ()))
        return
    module = arguments[0]
    find_packages_here(module.partition(".")[0])
    sys.argv[1:] = arguments[1:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except (ImportError, AttributeError) as error:
        sentence = explain_import_failure(error)
        if sentence is None:
            raise
        print(f"diptych: {sentence}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    _main(sys.argv[1:])
