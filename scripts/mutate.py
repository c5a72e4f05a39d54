"""Check whether the core tests notice a changed line.

Draws one-line mutations of the files given: an operator or a comparison flipped, a condition
negated, a constant off by one, a key misspelled, an argument dropped or swapped, a call left out,
None returned. Each is made in a copy of the working tree, where the core tests closest to the
module run first, and others only if those notice nothing. What is drawn follows from the seed.

    python scripts/mutate.py --count 20 lokakern/selection/dispatcher.py registry/*.py

Prints each mutation with the test that noticed it, and those that survived as a diff: each of these
lacks a test, or computes the same, which only a reader can tell.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lokakern", "registry", "bench", "kernels")
CLOSEST = 4  # test files that run first: most mutations end there
LIMIT_S = 3600.0  # a mutation that makes a test hang is noticed, too
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One line of a file, changed."""

    path: Path
    line: int
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}: {self.kind}"
        return f"{where}\n    - {self.before.strip()}\n    + {self.after.strip()}"

    def apply(self, root: Path) -> None:
        lines = (root / self.path).read_text("utf-8").splitlines(keepends=True)
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        (root / self.path).write_text("".join(lines), "utf-8")


def mutations_of(path: Path) -> list[Mutation]:
    """All mutations of a file."""
    source = (ROOT / path).read_text("utf-8")
    lines = source.splitlines(keepends=True)
    found = []
    for node, kind, text in _changes(ast.parse(source)):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        raw = line.encode()
        changed = (raw[: node.col_offset] + text.encode() + raw[node.end_col_offset :]).decode()
        if changed != line:
            found.append(Mutation(path, node.lineno, kind, line, changed))
    return found


Located = ast.expr | ast.stmt


def _changes(tree: ast.Module) -> Iterator[tuple[Located, str, str]]:
    """A node, what is changed, and the text in its place; no annotations, messages or words."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if id(node) in skipped or _only_says(node):
            skipped |= {id(child) for child in ast.iter_child_nodes(node)}
            continue
        skipped |= {id(part) for part in _not_code(node)}
        yield from _changes_of(node)


def _not_code(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that tests need not cover: types, messages of errors and logs, documentation."""
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from node.decorator_list
    if isinstance(node, ast.FunctionDef):
        yield from filter(None, [node.returns])
        if node.name in ("__repr__", "__str__"):
            yield from node.body
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        yield from ast.iter_child_nodes(node)
    if isinstance(node, ast.Assert) and node.msg is not None:
        yield node.msg
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        yield from ast.iter_child_nodes(node)


def _only_says(node: ast.AST) -> bool:
    """Whether a call, or a statement that is one, logs, warns, or talks to a type checker."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    name = ast.unparse(call.func)
    logs = re.match(r"_?log(ger)?\.", name) is not None
    return logs or name in ("cast", "TypeVar", "warnings.warn", "field")


def _changes_of(node: ast.AST) -> Iterator[tuple[Located, str, str]]:
    match node:
        case ast.Compare(ops=[op]):
            yield node, "comparison", _text(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in OPERATORS and not _is_text(node):
            yield node, "operator", _text(node, op=OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, "and/or", _text(node, op=other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "not left out", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield node, "constant", str(value + 1)
        case ast.Constant(value=float(value)):
            yield node, "constant", f"{2 * value + 1}"
        case ast.Return(value=ast.expr() as value):
            if ast.unparse(value) != "None":
                yield node, "returned value", "return None"
        case ast.Expr(value=ast.Call()):
            yield node, "call left out", "pass"
        case ast.Continue():
            yield node, "continue", "break"
    match node:  # beside what the above does
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, "condition", f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=[test, *_]):
            yield test, "condition", f"(not ({ast.unparse(test)}))"
        case ast.Subscript(slice=ast.Constant(value=str(key)) as at):
            yield at, "key", repr(f"{key}x")
        case ast.Dict(keys=keys):
            for at in keys:
                if isinstance(at, ast.Constant) and isinstance(at.value, str):
                    yield at, "key", repr(f"{at.value}x")
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            if not isinstance(second, ast.Starred):
                yield node, "arguments swapped", _text(node, args=[second, first, *rest])
        case ast.Call(keywords=[*others, ast.keyword(arg=str())]):
            yield node, "argument left out", _text(node, keywords=others)


def _text(node: ast.expr, **changed: object) -> str:
    other = copy.copy(node)
    for name, value in changed.items():
        setattr(other, name, value)
    text = ast.unparse(other)
    return text if isinstance(node, ast.Call) else f"({text})"


def _is_text(node: ast.BinOp) -> bool:
    """Whether strings are joined or formatted: texts, which tests need not check."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def tests_of(path: Path) -> list[list[str]]:
    """Test files in stages: the closest ones of a module; others that import it; all others.

    What imports only a module that imports it comes after what imports the module itself.
    """
    module = _module_of(path)
    sources = [file for folder in PACKAGES for file in sorted((ROOT / folder).rglob("*.py"))]
    users = [_module_of(file.relative_to(ROOT)) for file in sources if _mentions(module, file)]
    scores: dict[Path, float] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        scores[file] = float(_mentions(module, file))
        if not scores[file] and users:
            scores[file] = sum(min(_mentions(user, file), 50) for user in users) / 51 / len(users)
        if file.stem == f"test_{path.stem}":
            scores[file] = math.inf
    ranked = sorted((file for file in scores if scores[file]), key=lambda file: -scores[file])
    rest = [file for file in scores if not scores[file]]
    stages = (ranked[:CLOSEST], ranked[CLOSEST:], rest)
    return [[str(file.relative_to(ROOT)) for file in stage] for stage in stages]


def _module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] == "lokakern" else ("lokakern", *parts))


def _mentions(module: str, file: Path) -> int:
    """Count uses of a module, or of names imported from it, in a file that imports it."""
    names, words = _imports(file)
    return sum(words[name] for name in names.get(module, ()))


@functools.cache
def _imports(file: Path) -> tuple[dict[str, set[str]], Counter[str]]:
    """Names that a file has from each module, and how often each word is in it."""
    text = file.read_text("utf-8")
    names: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                names.setdefault(node.module, set()).add(name)
                names.setdefault(f"{node.module}.{alias.name}", set()).add(name)
    return names, Counter(re.findall(r"\w+", text))


def copy_of_tree(folder: Path) -> Path:
    """Files that git does not ignore; links stay links, so that packages point into the copy."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        source, target = ROOT / name, folder / name
        if not os.path.lexists(source):
            continue  # removed, and not committed
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    return folder


def run_tests(root: Path, files: Sequence[str], jobs: int) -> str:
    """Run tests and return the first failure, or an empty string."""
    if not files:
        return ""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not rest", "-p", "no:cacheprovider"]
    if jobs > 1:
        words += ["-n", str(jobs), "--dist", "worksteal"]
    # No bytecode: a changed file of the same size and second would be taken for the old one.
    environment = os.environ | {
        "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    try:
        ran = subprocess.run(
            [*words, *files], cwd=root, env=environment, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S:g} s"
    if ran.returncode in (0, 5):  # 5: no test was chosen
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", ran.stdout, re.MULTILINE)
    return failed[1] if failed else (ran.stdout + ran.stderr).strip()[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="modules, relative to the repository")
    add("--count", type=int, default=20, help="mutations to draw (default: 20)")
    add("--seed", type=int, default=0, help="of the draw (default: 0)")
    add("--jobs", type=int, default=1, help="processes that test (default: 1)")
    add("--list", action="store_true", help="print what is drawn, and test nothing")
    add("--stages", type=int, choices=(1, 2, 3), default=3,
        help="1: run the test files closest to a module only; 2: all that import it,\n"
        "or what imports it; 3: the whole core (default)")  # fmt: skip
    add("--at-least", type=float, default=0.0, metavar="SHARE",
        help="exit with 1 if a smaller share is noticed, such as 0.9")  # fmt: skip
    given = parser.parse_args()
    paths = [path.resolve().relative_to(ROOT) for path in given.files]
    every = [mutation for path in paths for mutation in mutations_of(path)]
    drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
    print(f"{len(drawn)} of {len(every)} mutations of {len(paths)} files, seed {given.seed}")
    if given.list:
        print(*drawn, sep="\n")
        return 0
    survived = []
    with tempfile.TemporaryDirectory(prefix="lokakern-mutations-") as folder:
        root = copy_of_tree(Path(folder))
        for number, mutation in enumerate(drawn, 1):
            begun = time.monotonic()
            mutation.apply(root)
            noticed = ""
            for stage in tests_of(mutation.path)[: given.stages]:
                noticed = noticed or run_tests(root, stage, given.jobs)
            shutil.copy2(ROOT / mutation.path, root / mutation.path)
            test = noticed.split(" - ")[0]
            if "::" in test and run_tests(root, [test], 1):
                print(f"{test} fails where nothing is changed, too", file=sys.stderr)
                return 2
            if not noticed:
                survived.append(mutation)
            how = f"noticed by {noticed}" if noticed else "SURVIVED"
            seconds = time.monotonic() - begun
            print(f"{number}. {mutation}\n    {how} ({seconds:.0f} s)", flush=True)
    share = 1 - len(survived) / len(drawn)
    print(f"\n{len(drawn) - len(survived)} of {len(drawn)} noticed ({share:.0%})")
    if survived:
        print("survived:", *survived, sep="\n")
    return int(share < given.at_least)


if __name__ == "__main__":
    sys.exit(main())
