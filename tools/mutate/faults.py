"""One source file in, the small faults that can be put into it out; `__main__` samples them.

A fault is a replacement of one span of text. Strings, annotations, asserts, messages of errors and logs, and the sizes
of time-outs and pauses are left alone: another text or another pause is not a fault.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_TUNING = re.compile(r"(^|_)(S|MS|SECONDS|BYTES|TRIES|ATTEMPTS|THREADS|WIDTH|PATIENCE|BACKLOG)$", re.IGNORECASE)
_PAUSES = {"sleep", "wait", "join", "settimeout", "poll", "select", "wait_for", "result", "acquire", "get"}
_LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}
_TEXT_METHODS = {"__repr__"}
_KEYWORDS = {"strict", "daemon", "slots", "repr", "compare", "text"}  # checks of our own bugs, and how a process ends


@dataclass(frozen=True)
class Fault:
    """One small fault: `after` in place of `before` at a span of a file."""

    path: str  # relative to the repository
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str
    statements: tuple[int, ...]  # first lines of statements; a test that executes one of them may notice the fault
    names: tuple[str, ...]  # of a statement that runs at import: what it defines
    function: str  # qualified name, or "" at module level

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.before} -> {self.after}"

    def apply(self, text: str) -> str:
        """Return `text` with this fault in it."""
        lines = text.splitlines(keepends=True)
        first, last = lines[self.line - 1].encode(), lines[self.end_line - 1].encode()
        head, tail = first[: self.column].decode(), last[self.end_column :].decode()
        return "".join([*lines[: self.line - 1], head + self.after + tail, *lines[self.end_line :]])


def faults_of(path: str, text: str) -> list[Fault]:
    """List every fault that can be put into a file, in the order of its text."""
    finder = _Finder(path, text)
    finder.body(ast.parse(text).body, function="", statements=(), names=())
    return sorted(finder.found, key=lambda fault: (fault.line, fault.column, fault.after))


class _Finder:
    """Walks statements with what encloses them; collects faults."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.found: list[Fault] = []
        self._function = ""
        self._statements: tuple[int, ...] = ()
        self._names: tuple[str, ...] = ()

    def body(self, body: list[ast.stmt], *, function: str, statements: tuple[int, ...], names: tuple[str, ...]) -> None:
        for statement in body:
            self._statement(statement, function, statements, names)

    def _statement(self, node: ast.stmt, function: str, statements: tuple[int, ...], names: tuple[str, ...]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._definition(node, function)
            return
        if isinstance(node, ast.ClassDef):
            if not any(isinstance(base, ast.Name) and base.id in ("Protocol", "TypedDict") for base in node.bases):
                self.body(node.body, function=f"{function}.{node.name}".lstrip("."), statements=(), names=(node.name,))
            return
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Nonlocal, ast.Pass)):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        self._function = function
        at_import = not statements
        self._statements = () if at_import else (node.lineno,)
        self._names = (*_defined(node), *names) if at_import else ()
        self._of_statement(node)
        tuned = any(_TUNING.search(name) for name in _defined(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
                self._expression(child, tuned=tuned)
            elif isinstance(child, ast.withitem):
                self._expression(child.context_expr)
        for inner in _bodies(node):
            self.body(inner, function=function, statements=() if at_import else (node.lineno,), names=self._names)
            self._function, self._statements = function, () if at_import else (node.lineno,)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef, function: str) -> None:
        qualified = f"{function}.{node.name}".lstrip(".")
        if node.name in _TEXT_METHODS or any(
            ast.unparse(decorator) in ("overload", "abstractmethod") for decorator in node.decorator_list
        ):
            return
        inside = tuple(sorted({each.lineno for each in ast.walk(node) if isinstance(each, ast.stmt)} - {node.lineno}))
        self._function, self._statements, self._names = qualified, inside, ()
        defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
        named = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) or None :] if defaults else []
        tuned = {id(d) for a, d in zip(named, node.args.defaults, strict=False) if _TUNING.search(a.arg)}
        tuned |= {
            id(d)
            for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if d and _TUNING.search(a.arg)
        }
        for default in defaults:
            if id(default) not in tuned:
                self._expression(default)
        self.body(node.body, function=qualified, statements=inside, names=())

    def _add(self, node: ast.expr | ast.stmt, after: str) -> None:
        before = ast.get_source_segment(self.text, node) or ""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        self.found.append(
            Fault(
                self.path, node.lineno, node.col_offset, end_line, end_column, " ".join(before.split()), after,
                self._statements, self._names, self._function,
            )
        )  # fmt: skip

    def _of_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                self._add(value, "None")
            case ast.Break():
                self._add(node, "continue")
            case ast.Continue():
                self._add(node, "break")
            case ast.Raise(exc=ast.expr()):
                self._add(node, "pass")
            case ast.Expr(value=ast.Call() as call) if not _is_log(call) and not ast.unparse(call).startswith(
                "time.sleep("
            ):
                self._add(node, "pass")
            case ast.AugAssign() if type(node.op) in _OPERATORS and not _is_text(node.value):
                changed = copy.deepcopy(node)
                changed.op = _OPERATORS[type(node.op)]()
                self._add(node, ast.unparse(changed))
            case ast.If() | ast.While() if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.NamedExpr)):
                self._add(node.test, f"(not ({ast.unparse(node.test)}))")

    def _expression(self, node: ast.expr, *, tuned: bool = False) -> None:
        """Add the faults of an expression and of what is inside it."""
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _is_log(node)):
            return
        match node:
            case ast.Constant(value=bool() as value):
                self._add(node, str(not value))
            case ast.Constant(value=int() | float() as value) if not tuned:
                self._add(node, f"({value} + 1)" if value >= 0 else f"({value} - 1)")
                if value:
                    self._add(node, f"({value} - 1)")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._add(node, f"({ast.unparse(operand)})")
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
                self._add(node, f"({ast.unparse(operand)})")
            case ast.BoolOp():
                changed = copy.deepcopy(node)
                changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                self._add(node, f"({ast.unparse(changed)})")
            case ast.Compare():
                for position, operator in enumerate(node.ops):
                    compared = copy.deepcopy(node)
                    compared.ops[position] = _COMPARISONS[type(operator)]()
                    self._add(node, f"({ast.unparse(compared)})")
            case ast.BinOp(op=ast.BitOr()) if not self._statements:
                return  # a union of types
            case ast.BinOp(op=operator) if type(operator) in _OPERATORS and not _is_text(node):
                computed = copy.deepcopy(node)
                computed.op = _OPERATORS[type(operator)]()
                self._add(node, f"({ast.unparse(computed)})")
        self._inside(node, tuned=tuned)

    def _inside(self, node: ast.expr, *, tuned: bool) -> None:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            self._expression(node.func)
            for argument in node.args:
                self._expression(argument, tuned=name in _PAUSES)
            for keyword in (each for each in node.keywords if each.arg not in _KEYWORDS):
                self._expression(keyword.value, tuned=bool(keyword.arg and _is_pause(keyword.arg)))
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, tuned=tuned)
            elif isinstance(child, ast.comprehension):
                for each in (child.iter, *child.ifs):
                    self._expression(each)


def statement_lines(text: str) -> dict[int, set[str]]:
    """Map the first line of every statement in a function to the names it mentions."""
    found: dict[int, set[str]] = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in _statements(function.body):
                mentioned = found.setdefault(node.lineno, set())
                for each in _own_expressions(node):
                    if isinstance(each, ast.Name):
                        mentioned.add(each.id)
                    elif isinstance(each, ast.Attribute):
                        mentioned.add(each.attr)
                    elif isinstance(each, ast.keyword) and each.arg:
                        mentioned.add(each.arg)
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for inner in _bodies(node):
                yield from _statements(inner)


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.expr, ast.withitem)):
            yield from ast.walk(child)


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        if inner := getattr(node, field, None):
            yield inner
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _defined(node: ast.stmt) -> tuple[str, ...]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return tuple(each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name))


def _is_log(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _LOGS and "log" in ast.unparse(call.func).lower()


def _is_pause(name: str) -> bool:
    return "timeout" in name or bool(_TUNING.search(name))


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
