"""Record which statements of deepvm run, in every process of a scratch copy: the interpreter's start imports this.

Each statement sets one byte of a file that all processes map. So nothing is lost when a process is killed, and
what a long-lived memory node does during a test is recorded for that test. `scratch` writes the call of `start` below.
"""

import ast
import importlib.machinery
import mmap
import sys

HITS: mmap.mmap
OFFSETS: dict[str, int] = {}


def start(file: str, sizes: dict[str, int]) -> None:
    """Map the file of hits, and let imports of the source files named in `sizes` (file -> lines) be recorded."""
    global HITS
    with open(file, "r+b") as handle:
        HITS = mmap.mmap(handle.fileno(), 0)
    offset = 0
    for name, lines in sizes.items():
        OFFSETS[name] = offset
        offset += lines
    sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "deepvm" and not name.startswith("deepvm."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in OFFSETS:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                _observe(node, OFFSETS[path], docstring=True)
        tree.body[_after_imports(tree) : 0] = ast.parse("from deepvm_line_hits import HITS as _line_hits").body
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)


def _after_imports(tree):
    """Return where a statement may come first: after the docstring and `from __future__`."""
    last = 0
    for number, node in enumerate(tree.body):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (text and number == 0) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            last = number + 1
    return last


def _observe(node, offset, *, docstring=False):
    for field in ("body", "orelse", "finalbody"):
        if inner := getattr(node, field, None):
            setattr(node, field, _with_hits(inner, offset, docstring=docstring and field == "body"))
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        part.body = _with_hits(part.body, offset)


def _with_hits(body, offset, *, docstring=False):
    made = []
    for number, node in enumerate(body):
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Global, ast.Nonlocal)) or (docstring and number == 0 and constant):
            made.append(node)
            continue
        hit = ast.Assign(
            targets=[
                ast.Subscript(
                    value=ast.Name("_line_hits", ast.Load()), slice=ast.Constant(offset + node.lineno), ctx=ast.Store()
                )
            ],
            value=ast.Constant(1),
        )
        made.append(ast.copy_location(hit, node))
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            _observe(node, offset)
        made.append(node)
    return made
