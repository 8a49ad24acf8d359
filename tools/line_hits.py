"""Record which statements and branches of deepvm run, in every process; the interpreter's start imports this.

Each statement sets one byte of a file that all processes map, and so does each branch that has no statement of its own
(an `if` without `else`, the end of a loop). So nothing is lost when a process is killed, and it costs far less than a
trace function. Statements of functions count; those of modules run at every import. `recorder` calls `start`.

Files of deepvm are compiled with these marks when they are imported; the sources and their compiled files stay as they
are. A byte's place: the file's offset + 2 * line, and one more for the branch.
"""

import ctypes
import importlib.machinery
import marshal
import mmap
import os
import sys

HITS: memoryview
OFFSETS: dict[str, int] = {}
COMPILED = ""


def start(folder: str, offsets: dict[str, int]) -> None:
    """Map the hits of a folder that `recorder` made, and mark the source files of `offsets` at their import."""
    global HITS, COMPILED
    HITS = _mapped(f"{folder}/hits")
    OFFSETS.update(offsets)
    COMPILED = f"{folder}/compiled"
    sys.meta_path.insert(0, _Finder())


def _mapped(path):
    """Map a file without a descriptor that stays open, as mmap.mmap has one: tests count them."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot map {path}")
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "deepvm" and not name.startswith("deepvm."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in OFFSETS:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Keeps its compiled files apart: those beside the sources are without marks."""

    def get_code(self, fullname):  # noqa: ARG002
        kept = f"{COMPILED}/{compiled_name(self.path, OFFSETS[self.path])}"
        try:
            with open(kept, "rb") as file:
                return marshal.load(file)  # noqa: S302 - written below
        except (OSError, EOFError, ValueError):
            code = marked(self.get_data(self.path), self.path, OFFSETS[self.path])
        with open(f"{kept}.{os.getpid()}", "wb") as file:
            marshal.dump(code, file)
        os.replace(file.name, kept)
        return code


def compiled_name(path, offset):
    """Return a name that no other version of a source file has."""
    stat = os.stat(path)
    return f"{offset}-{stat.st_mtime_ns}-{stat.st_size}-{sys.hexversion}"


def marked(text, path, offset):
    """Compile a source file with marks."""
    import ast

    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = _with_marks(ast, node.body, offset)
    first = 0
    for number, node in enumerate(tree.body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            first = number + 1
    tree.body[first:first] = ast.parse(f"from {__name__} import HITS as _line_hits").body
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def _with_marks(ast, body, offset):
    made = []
    for node in body:
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (constant or isinstance(node, (ast.Global, ast.Nonlocal))):
            made.append(_mark(ast, node, offset + 2 * node.lineno))
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                _mark_inside(ast, node, offset)
        made.append(node)
    return made


def _mark_inside(ast, node, offset):
    for field in ("body", "orelse", "finalbody"):
        if inner := getattr(node, field, None):
            setattr(node, field, _with_marks(ast, inner, offset))
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        part.body = _with_marks(ast, part.body, offset)
    if isinstance(node, (ast.If, ast.While, ast.For, ast.AsyncFor)) and not node.orelse:
        node.orelse = [_mark(ast, node, offset + 2 * node.lineno + 1)]


def _mark(ast, node, place):
    hits = ast.Name("_line_hits", ast.Load())
    mark = ast.Assign(targets=[ast.Subscript(hits, ast.Constant(place), ast.Store())], value=ast.Constant(1))
    return ast.copy_location(mark, node)
