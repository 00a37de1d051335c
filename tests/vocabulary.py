"""Check the words of the code: `python -m tests.vocabulary [FOLDER …]`, a part of `make check`.

A docstring begins with a noun phrase or, for a function, with a verb; never with a pronoun, a preposition or
a conjunction. Words that the code does not use are listed below with what to say instead. A package has no
public class name twice. Public functions of Triton modules are typed and name the shapes of their tensors.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("diptych", "gateway", "prefill_worker", "decode_worker", "kvtransfer", "kernels", "lab")
GENERATED = ("diptych/v1", "diptych/worker/v1", "diptych/kserve")
FIRST_WORDS = re.compile(
    r"(?:Of|As|Also|One|It|Its|Those|These|This|That|They|Their|He|She|You|We|Our|Ours|Us|Whoever|Whatever|Who|"
    r"Whose|What|Which|Where|When|Why|How|From|In|Into|At|By|To|For|With|Without|Within|On|Over|Under|After|"
    r"Before|Beside|Besides|Between|Behind|Beyond|Until|Since|Through|Against|Among|Above|About|Nobody|"
    r"Somebody|Anybody|Everybody|Everything|Something|Nothing|Both|Each|"
    r"Else|If|Whether|So|And|But|Or|Than|The same|"
    r"Some|All|Any|Is|Are|Has|Does|May|Must)\b"
)
FUNCTION_WORDS = re.compile(r"(?:The|A|An|No|True|False)\b")
UNUSED = {
    r"hand-?over": "handoff",
    r"[Nn]obody|[Ss]omebody|[Aa]nybody|[Ww]hoever|[Ee]verybody": "the type that is meant",
    r"[Dd]oors?\b": "API, frontend",
    r"[Mm]useum|[Ee]xhibits?": "known bugs",
    r"last word": "terminal message",
    r"\bgangs?\b": "step group",
    r"[Ss]etbacks?|[Cc]asualt": "attempt history, failed workers",
}
UNUSED_WORD = re.compile("|".join(f"(?P<w{i}>\\b(?:{word}))" for i, word in enumerate(UNUSED)))
Attributes = Iterator[tuple[int, str]]
TYPED_WITH_SHAPES = "kernels/gpu"


def check_file(path: Path, root: Path) -> Iterator[str]:
    """Yield a line for every fault of one module."""
    source, name = path.read_text(), path.relative_to(root)
    for number, line in enumerate(source.splitlines(), 1):
        if found := UNUSED_WORD.search(line):
            instead = list(UNUSED.values())[int(str(found.lastgroup)[1:])]
            yield f"{name}:{number}: {found.group()!r} is not a word of this code: {instead}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text, function = (
            ast.get_docstring(node) or "",
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef),
        )
        where = f"{name}:{getattr(node, 'lineno', 1)}"
        if FIRST_WORDS.match(text) or (function and not _is_property(node) and FUNCTION_WORDS.match(text)):
            yield f"{where}: begin with a {'verb' if function else 'noun'}, not {text.splitlines()[0][:50]!r}"
        for line, words in _attribute_docstrings(node):
            if FIRST_WORDS.match(words):
                yield f"{name}:{line}: begin with a noun, not {words.splitlines()[0][:50]!r}"
        if function and str(name).startswith(TYPED_WITH_SHAPES) and not _is_kernel(node):
            yield from _untyped(node, where, text)


def _attribute_docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Attributes:
    """Yield line and text of each string that stands below an attribute or a constant."""
    for statement in node.body[1:]:
        match statement:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield statement.lineno, text


def _is_property(node: ast.AST) -> bool:
    decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
    return any(one.rpartition(".")[2] in ("property", "cached_property") for one in decorators)


def _is_kernel(node: ast.AST) -> bool:
    return any("jit" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))


def _untyped(node: ast.AST, where: str, text: str) -> Iterator[str]:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if node.name.startswith("_"):
        return
    arguments = [one for one in (*node.args.args, *node.args.kwonlyargs) if one.arg not in ("self", "cls")]
    if node.returns is None or any(one.annotation is None for one in arguments):
        yield f"{where}: {node.name} lacks types"
    tensors = [one for one in arguments if one.annotation and "Tensor" in ast.unparse(one.annotation)]
    if tensors and not re.search(r"\[[^\]]+\]", text):
        yield f"{where}: {node.name} takes tensors and names no shape such as `[tokens, heads, head_dim]`"


def repeated_classes(package: str, paths: list[Path], root: Path) -> Iterator[str]:
    """Yield a line for every public class name that one package has twice."""
    seen: dict[str, Path] = {}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if first := seen.get(node.name):
                    yield f"{path.relative_to(root)}: {package} has a class {node.name} in {first} already"
                seen[node.name] = path.relative_to(root)


def main(folders: list[str], root: Path = Path(__file__).parents[1]) -> int:
    """Print the faults in the folders given, or in every package; return how many there are."""
    faults: list[str] = []
    for package in PACKAGES:
        paths = sorted((root / package).rglob("*.py"))
        paths = [path for path in paths if not str(path.relative_to(root)).startswith(GENERATED)]
        for path in paths:
            if not folders or str(path.relative_to(root)).startswith(tuple(folders)):
                faults += check_file(path, root)
        rooms = {path.relative_to(root).parts[: 2 if package in ("diptych", "lab") else 1] for path in paths}
        for room in sorted(rooms):
            if not folders or "/".join(room).startswith(tuple(folders)) or tuple(folders) == room[:1]:
                inside = [path for path in paths if path.relative_to(root).parts[: len(room)] == room]
                faults += repeated_classes("/".join(room), inside, root)
    print("\n".join(faults) or "the words are the house's")
    return len(faults)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
