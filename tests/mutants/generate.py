"""One-line mutations of Python source: every place where one token or one statement can be changed into another that runs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = ["Mutation", "changes", "mutations", "sample"]

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}
_SWAPPED = {"max": "min", "min": "max", "any": "all", "all": "any"}
_TALK = ("log", "logger", "logging", "print", "warnings")  # what is said along the way is no result


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Replace ``old``, which begins at (line, column) of a file and ends in that line, by ``new``."""

    path: str
    line: int  # from 1
    column: int  # in UTF-8 bytes, as ast counts
    old: str
    new: str
    kind: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.old} -> {self.new}"

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        raw, old = lines[self.line - 1].encode(), self.old.encode()
        assert raw[self.column : self.column + len(old)] == old, self
        lines[self.line - 1] = (raw[: self.column] + self.new.encode() + raw[self.column + len(old) :]).decode()
        return "".join(lines)


def mutations(path: str, source: str) -> list[Mutation]:
    """All mutations of a module, in the order of their lines."""
    return sorted(_Visitor(path, source).of(ast.parse(source)), key=lambda m: (m.line, m.column, m.new))


@functools.cache
def changes(mutation: Mutation, source: str) -> bool:
    """Whether the mutated module compiles and is another one."""
    try:
        return ast.dump(ast.parse(mutation.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def sample(root: Path, paths: Iterable[str], count: int, seed: int) -> list[Mutation]:
    """``count`` mutations of some files, drawn so that every kind comes about equally often, no line twice."""
    rng = random.Random(f"{seed} {sorted(paths)}")
    by_kind: dict[str, list[Mutation]] = {}
    for path in sorted(paths):
        for mutation in _all(path, (root / path).read_text()):
            by_kind.setdefault(mutation.kind, []).append(mutation)
    for pool in by_kind.values():
        rng.shuffle(pool)
    drawn: list[Mutation] = []
    lines: set[tuple[str, int]] = set()
    while len(drawn) < count and any(by_kind.values()):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(drawn) < count:
                mutation = by_kind[kind].pop()
                place = mutation.path, mutation.line
                if place not in lines and changes(mutation, (root / mutation.path).read_text()):
                    lines.add(place)
                    drawn.append(mutation)
    return drawn


@functools.cache
def _all(path: str, source: str) -> tuple[Mutation, ...]:
    """All mutations of a file: to find them takes much longer than to draw some."""
    return tuple(mutations(path, source))


class _Visitor:
    def __init__(self, path: str, source: str) -> None:
        self._path, self._lines = path, [line.encode() for line in source.splitlines()]

    def of(self, tree: ast.AST) -> Iterator[Mutation]:
        for node in self._executed(tree):
            if node_line(node) is not None:
                yield from self._of_node(node)

    def _executed(self, node: ast.AST) -> Iterator[ast.AST]:
        """Nodes of code that runs and decides something: no annotations, decorators, docstrings, messages, ``if TYPE_CHECKING``."""
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params") or (isinstance(node, ast.Raise) and name == "exc"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_talk(child) and not isinstance(child, (ast.JoinedStr, ast.Assert)):
                    yield from self._executed(child)

    def _of_node(self, node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield from self._replace(node.test, "condition negated", lambda text: f"(not ({text}))")
        elif isinstance(node, (ast.Compare, ast.BoolOp, ast.BinOp)):
            yield from self._operator(node)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SWAPPED:
            yield from self._replace(node.func, "largest or smallest", lambda text: _SWAPPED[text])
        elif isinstance(node, ast.stmt):
            yield from self._statement(node)

    def _operator(self, node: ast.Compare | ast.BoolOp | ast.BinOp) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare):
            parts, new, kind = [node.left, *node.comparators], _COMPARISONS[type(node.ops[0])], "comparison"
            if len(node.ops) > 1:
                return
        elif isinstance(node, ast.BoolOp):
            parts, new, kind = node.values, "or" if isinstance(node.op, ast.And) else "and", "and or or"
        else:
            parts, new, kind = [node.left, node.right], _ARITHMETIC.get(type(node.op), ""), "arithmetic"
            if not new or any(map(_is_text, parts)):
                return
        texts = [self._text(part) for part in parts]
        if all(texts):
            yield from self._replace(node, kind, lambda _: "(" + f" {new} ".join(f"({text})" for text in texts) + ")")

    def _statement(self, node: ast.stmt) -> Iterator[Mutation]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from self._replace(node, "call dropped", lambda _: "pass")
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Attribute):
                yield from self._replace(node, "assignment dropped", lambda _: "pass")
        elif isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "None":
            first = node.body[1] if len(node.body) > 1 and _is_docstring(node.body[0]) else node.body[0]
            simple = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Raise)
            if isinstance(first, simple) and not _is_docstring(first) and ast.unparse(first) != "...":
                yield from self._replace(first, "returns at once", lambda text: f"return; {text}")

    def _constant(self, node: ast.Constant) -> Iterator[Mutation]:
        if isinstance(node.value, bool):
            yield from self._replace(node, "constant", lambda _: str(not node.value))
        elif isinstance(node.value, int):
            yield from self._replace(node, "constant", lambda text: f"({text} + 1)")

    def _text(self, node: ast.AST) -> str:
        """The source of a node in one line, "" if it has several."""
        line, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        if line != end:
            return ""
        return self._lines[line - 1][node.col_offset : node.end_col_offset].decode()  # type: ignore[attr-defined]

    def _replace(self, node: ast.AST, kind: str, new: Callable[[str], str]) -> Iterator[Mutation]:
        text = self._text(node)
        if text:
            yield Mutation(self._path, node.lineno, node.col_offset, text, new(text), kind)  # type: ignore[attr-defined]


def node_line(node: ast.AST) -> int | None:
    return getattr(node, "lineno", None)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_talk(node: ast.AST) -> bool:
    """A statement that logs, an assignment of ``__all__``, a docstring."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__slots__", "_fields_")
    if not isinstance(node, ast.Expr):
        return False
    return _is_docstring(node) or any(word in ast.unparse(node).split("(")[0].lower() for word in _TALK)
