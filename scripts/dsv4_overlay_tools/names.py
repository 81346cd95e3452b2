"""What a file of the overlay needs of vLLM by name, told from the text of both: nothing is imported."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Files = Mapping[str, bytes]  # path below the root of a vLLM -> its bytes


@dataclass(frozen=True)
class Need:
    """A name that is not there: the line of the overlay file that needs it, and what it says."""

    line: int
    what: str
    later: bool = False  # needed only when a function is called, perhaps on some releases only


@functools.cache
def _parse(path: str, data: bytes) -> ast.Module:
    return ast.parse(data, path)


def module_path(name: str, files: Files) -> str | None:
    """The file of a module, `name` dotted; None if there is none."""
    base = name.replace(".", "/")
    return next((path for path in (base + ".py", base + "/__init__.py") if path in files), None)


def _absolute(node: ast.ImportFrom, path: str) -> str:
    """The module that `from ... import` in the file at `path` names."""
    package = path.split("/")[: -node.level] if node.level else []
    return ".".join([*package, *([node.module] if node.module else [])])


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run with `body`, those of its branches included and those of functions not."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for name in ("body", "orelse", "finalbody"):
            if not (name == "body" and _for_types_only(node)):
                yield from _statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Each name that running `body` gives a value (or a type: fields of a class), and by which statement."""
    found: dict[str, ast.stmt] = {}
    for node in _statements(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found |= {name.id: node for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def defines(path: str, name: str, files: Files) -> bool:
    """Whether the module at `path` has `name` after it is run."""
    body = _parse(path, files[path]).body
    bound = _bound(body)
    if name in bound:
        return True
    if "__getattr__" in bound:  # it makes names when they are asked for
        return re.search(rf"\b{re.escape(name)}\b".encode(), files[path]) is not None
    stars = [node for node in _statements(body) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    sources = [module_path(_absolute(node, path), files) for node in stars]
    return any(source and defines(source, name, files) for source in sources)


def missing_imports(path: str, files: Files, ours: Files) -> tuple[int, list[Need]]:
    """How many names the overlay file at `path` imports from vLLM, or has as the text of a string, and those that
    `files` lack. `ours` are all files of the overlay."""
    tree = _parse(path, ours[path])
    top = {id(node) for node in _statements(tree.body)}
    types_only = {id(inner) for node in ast.walk(tree) if _for_types_only(node)
                  for statement in node.body for inner in ast.walk(statement)}  # fmt: skip
    count, missing = 0, []

    def need(node: ast.AST, module: str, name: str | None, what: str) -> None:
        nonlocal count
        inside = f"{module}.{name}" if name else module
        if module.partition(".")[0] != "vllm" or module_path(inside, ours) or module_path(module, ours):
            return
        count += 1
        place = module_path(module, files)
        if not (module_path(inside, files) or (name and place and defines(place, name, files))):
            missing.append(Need(node.lineno, what, id(node) not in top))

    for node in ast.walk(tree):
        if id(node) in types_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                need(node, alias.name, None, f"import {alias.name}")
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, path)
            for alias in node.names:
                name = None if alias.name == "*" else alias.name
                need(node, module, name, f"from {module} import {alias.name}")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
            module, _, name = node.value.rpartition(".")
            need(node, module, name, repr(node.value))
    return count, missing


# ---------------------------------------------------------------- what is used


def imports(path: str, data: bytes) -> set[str]:
    """The dotted names that the file at `path` imports, or names in a string to import later.

    `from a import b` gives a and a.b, since b may be a module. A name in a string counts only if it is the whole
    string, as in importlib.import_module("vllm.x") or a table of class paths, so that prose does not.
    Raises SyntaxError, ValueError.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(data, path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, path)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
            found.add(node.value)
    return found


def reached(ours: Files, roots: set[str]) -> set[str]:
    """The files of the overlay that the modules `roots` lead to. Raises SyntaxError, ValueError."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
               for path in ours if path.endswith(".py")}  # fmt: skip
    found: set[str] = set()
    new = roots
    while new:
        # Importing a.b.c runs a and a.b first.
        names = {name.rsplit(".", cut)[0] for name in new for cut in range(name.count(".") + 1)}
        paths = {modules[name] for name in names if name in modules} - found
        found |= paths
        new = {name for path in paths for name in imports(path, ours[path])}
    # Anything else (a .cu, a .json) is used if a file that is used names it.
    while True:
        text = b"\n".join(ours[path] for path in found)
        more = {path for path in ours.keys() - found
                if not path.endswith(".py") and path.rpartition("/")[2].encode() in text}  # fmt: skip
        if not more:
            return found
        found |= more


# ---------------------------------------------------------------- what is overridden


def _class(path: str, name: str, files: Files) -> tuple[str, ast.ClassDef] | None:
    """Where the class that the module at `path` has as `name` is made, and how."""
    node = _bound(_parse(path, files[path]).body).get(name)
    if isinstance(node, ast.ClassDef):
        return path, node
    if isinstance(node, ast.ImportFrom):
        alias = next(alias for alias in node.names if name in (alias.asname, alias.name))
        source = module_path(_absolute(node, path), files)
        return _class(source, alias.name, files) if source else None
    return None


def _gone(path: str, node: ast.ClassDef, files: Files) -> Iterator[str]:
    """What the class at `path` derives from by an import that finds nothing."""
    bound = _bound(_parse(path, files[path]).body)
    for base in node.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        source = bound.get(name)
        if isinstance(source, ast.ImportFrom) and _absolute(source, path).partition(".")[0] == "vllm":
            alias = next(alias for alias in source.names if name in (alias.asname, alias.name))
            module = module_path(_absolute(source, path), files)
            if not (module and defines(module, alias.name, files)):
                yield alias.name


def _line_of_descent(path: str, node: ast.ClassDef, files: Files) -> Iterator[tuple[str, ast.ClassDef]]:
    """The class and, as far as they are in `files`, all that it derives from, each with its file."""
    yield path, node
    for base in node.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        if found := _class(path, name, files):
            yield from _line_of_descent(*found, files)


def _anywhere(name: str, files: Files) -> bool:
    """Whether any class of vLLM has `name`, as far as lines by themselves tell."""
    word = re.escape(name)
    pattern = re.compile(rf"^\s+((async )?def {word}\(|{word}\s*[:=])|\bself\.{word}\b".encode(), re.MULTILINE)
    return any(path.endswith(".py") and pattern.search(data) for path, data in files.items())


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _texts(nodes: list[ast.expr]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def missing_overrides(path: str, files: Files, ours: Files) -> tuple[int, list[Need]]:
    """How many names of vLLM's classes the overlay file at `path` replaces, and those that are not there.

    Those are what it asserts itself when it is imported: all that a class with the decorator `overriding` defines,
    but for the decorator's arguments, and what is given to `require`. Where a base is only known when the overlay
    runs, the name has to be in some class of vLLM.
    """
    tree = _parse(path, ours[path])
    both = {**files, **ours}
    count, missing = 0, []

    def replaced(node: ast.AST, names: Iterable[str]) -> None:
        nonlocal count
        for name in names:
            count += 1
            if not _anywhere(name, files):
                missing.append(Need(node.lineno, f"{name} is replaced, which no class of vLLM has"))

    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            marks = [mark for mark in node.decorator_list if _calls(mark, "overriding")]
            added = {name for mark in marks for name in _texts(mark.args)}
            line = list(_line_of_descent(path, node, both)) if marks else []
            own = [cls for place, cls in line if place in ours]
            theirs = [cls for place, cls in line if place not in ours]
            has = {name for cls in theirs for name in _bound(cls.body)}
            names = {name for cls in own for name in _bound(cls.body) if not name.startswith("__")} - added
            if gone := list(_gone(path, node, both)) if marks else []:
                count += len(names)
                missing += [Need(node.lineno, f"{node.name} derives from {name}, which is gone") for name in gone]
                continue
            if not theirs:
                replaced(node, sorted(names))
                continue
            count += len(names)
            missing += [Need(node.lineno, f"{node.name} overrides {name}, which {theirs[0].name} does not have")
                        for name in sorted(names - has)]  # fmt: skip
        elif _calls(node, "require"):
            replaced(node, _texts(node.args))
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            calls = [inner for inner in ast.walk(node) if _calls(inner, "require")]
            if any(ast.unparse(call.args[-1]) == ast.unparse(node.target) for call in calls):
                replaced(node, sorted(_texts(node.iter.elts)))
    return count, missing
