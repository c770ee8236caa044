"""Hashes of what results depend on: plain values, tensors, and users' code."""

import ast
import hashlib
import inspect
import json
import secrets
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_VERSIONED = ("gradveil", "torch", "builtins")
_SESSION = secrets.token_hex(8)  # stands for code whose text nobody can read


def short_hash(facts: object) -> str:
    """16 hexadecimal digits for values that JSON can hold."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest(terms: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of named tensors (shape, type and values), in hexadecimal digits."""
    result = hashlib.sha256(terms.encode())
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        result.update(flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"")
    return result.hexdigest()


def source_hash(*things: object) -> str:
    """A hash of the user's code behind classes, functions, objects or texts `pkg.mod:name`: the files that define them,
    and all files of the user that those import. Code of gradveil and torch does not count: it has versions.

    Of the script that is run only the statements that the code uses count; of an installed package the defining file; of
    a notebook the code's own text. Code typed into a plain console is different in every session.
    """
    texts: dict[str, bytes] = {}
    for thing in things:
        thing = sys.modules.get(thing.partition(":")[0]) if isinstance(thing, str) else thing
        kind = thing if isinstance(thing, (type, ModuleType)) or inspect.isroutine(thing) else type(thing)
        module = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
        if module.partition(".")[0] in _VERSIONED:
            continue
        name = getattr(kind, "__qualname__", "")
        files = _files_behind(module, name.partition(".")[0]) or {module: _typed_text(kind).encode()}
        texts |= {f"{module}:{name}": files.pop(module), **files}
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest() if texts else ""


def _files_behind(root: str, defined: str) -> dict[str, bytes]:
    """By name: the module `root`, its packages and the user's modules that these import. Of a script what `defined` uses."""
    files: dict[str, bytes] = {}
    names = [*_prefixes(root)] if _file_of(root) else []
    while names:
        name = names.pop()
        file = _file_of(name)
        if file is None or name in files:
            continue
        of_user = _STANDARD_LIBRARY not in file.parents and not {"site-packages", "dist-packages"} & set(file.parts)
        if name == root or of_user:
            files[name] = file.read_bytes() if name != "__main__" else _used_part(file.read_bytes(), defined)
        if of_user and file.suffix == ".py":
            names += _imported(files[name], name if file.stem == "__init__" else name.rpartition(".")[0])
    return files


def _used_part(script: bytes, name: str) -> bytes:
    """The statements that define `name` and, in turn, the names that those use; all if none defines it."""
    parts: list[ast.stmt] = []
    statements, used = ast.parse(script).body, {name, "*"}
    while more := [s for s in statements if s not in parts and used & _defined_by(s)]:
        parts += more
        used |= {node.id for part in more for node in ast.walk(part) if isinstance(node, ast.Name)}
    is_defined = any(name in _defined_by(part) for part in parts)
    return "\n".join(map(ast.unparse, parts)).encode() if is_defined else script


def _defined_by(statement: ast.stmt) -> set[str]:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(statement, definitions):
        return {statement.name}
    nodes = list(ast.walk(statement))
    names = {n.name for n in nodes if isinstance(n, definitions)}
    names |= {n.asname or n.name.partition(".")[0] for n in nodes if isinstance(n, ast.alias)}
    return names | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _imported(text: bytes, package: str) -> Iterator[str]:
    """The names of modules that a file of `package` may import; some may be names of functions or classes instead."""
    nodes: list[ast.AST] = []
    with suppress(SyntaxError):  # it is being edited; its text counts all the same
        nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (prefix for alias in node.names for prefix in _prefixes(alias.name))
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (*_prefixes(base), *(f"{base}.{alias.name}" for alias in node.names))


def _prefixes(name: str) -> Iterator[str]:
    """`a.b.c`: a, a.b, a.b.c, because importing the last runs all."""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _file_of(name: str) -> Path | None:
    """The file of a module, which is not imported for that."""
    if name.partition(".")[0] in _VERSIONED:
        return None
    if file := getattr(sys.modules.get(name), "__file__", None):
        return Path(file)
    origin, path = None, None
    for prefix in _prefixes(name):
        spec = PathFinder.find_spec(prefix, path)
        if spec is None:
            return None
        origin, path = spec.origin, spec.submodule_search_locations
    return Path(origin) if origin else None


def _typed_text(kind: object) -> str:
    functions = filter(inspect.isfunction, [kind, *getattr(kind, "__dict__", {}).values()])
    try:
        return "".join(map(inspect.getsource, functions)) or _SESSION
    except OSError:  # typed into a plain console, or made by a decorator
        return _SESSION
