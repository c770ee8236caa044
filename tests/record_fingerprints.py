"""Records the fingerprint of the code behind every attack, defense, metric and the protocol, with its version.

    python tests/record_fingerprints.py

Results are stored under keys that hold these versions. `tests/test_fingerprints.py` fails when code has changed since it
was recorded. If results change, raise the version first; then run this script. It records the catalogue of all methods too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
RECORD = Path(__file__).with_name("fingerprints.json")

# What all cells share. A method's own files are those that it imports from attacks, defenses and metrics.
PROTOCOL = (
    "core/*.py",
    "client.py",
    "models/*.py",
    "data/dataset.py",
    "defenses/base.py",
    "attacks/base.py",
    "attacks/budget.py",
    "attacks/layers.py",
    "attacks/unit_length.py",
    "attacks/labels/*.py",
    "attacks/matching/dense.py",
    "attacks/matching/distances.py",
    "attacks/matching/engine.py",
    "attacks/matching/frozen.py",
    "attacks/matching/optimizers.py",
    "attacks/matching/priors.py",
    "attacks/matching/problem.py",
    "attacks/matching/rows.py",
    "attacks/matching/starts.py",
    "attacks/matching/unknowns.py",
    "metrics/baseline.py",
    "metrics/identification.py",
    "metrics/matching.py",
    "metrics/scores.py",
    "federation/*.py",
    "auditing/case.py",
    "auditing/cells.py",
    "auditing/device.py",
)
PROTOCOL_WITHOUT = (
    *(f"core/{name}.py" for name in ("__init__", "errors", "hashing", "notebook", "progress", "settings", "text")),
    *(f"federation/{name}.py" for name in ("__init__", "checkpoint", "faults", "flower_engine", "history")),
)
COST = ("auditing/cost.py", "auditing/utility.py")
METHODS = ("attacks", "defenses", "metrics")
# No result of a cell depends on these.
OTHERS = (
    *(f"{package}/**/__init__.py" for package in METHODS),  # they only import
    "*/registry.py",
    "attacks/suite.py",
    "metrics/leak_test.py",
    "defenses/data/ats/scores.py",
    "defenses/data/ats/search.py",
)


def files(patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in (SOURCE / "gradveil").glob(pattern)}


def fingerprint(texts: Iterable[str]) -> str:
    """A hash of Python code without comments, docstrings, annotations and formatting."""
    return hashlib.sha256(f"[{', '.join(map(_code, texts))}]".encode()).hexdigest()[:16]


@cache  # one file is behind many methods
def _code(text: str) -> str:
    return repr(_plain(ast.parse(text)))


def _plain(node: object) -> object:
    """A syntax tree as tuples. Empty fields are left out, so that all versions of Python give the same."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    for name in ("annotation", "returns", "type_comment", "simple"):
        fields.pop(name, None)
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            fields["body"] = node.body[1:]
    return (type(node).__name__, *((name, _plain(value)) for name, value in sorted(fields.items())))


def files_of(module: str, shared: set[Path]) -> set[Path]:
    """The file of a method, and all that it imports from the packages of methods, less what is shared by all."""
    paths, names = set[Path](), [module]
    while names:
        name = names.pop()
        path = SOURCE / f"{name.replace('.', '/')}.py"
        is_method = name.startswith(tuple(f"gradveil.{package}." for package in METHODS))
        if is_method and path.is_file() and path not in paths | shared:
            paths.add(path)
            names += _imports(path, name)
    return paths


@cache
def _imports(path: Path, module: str) -> tuple[str, ...]:
    from gradveil.core.hashing import _imported

    return tuple(_imported(path.read_bytes(), module.rpartition(".")[0]))


def covered() -> dict[str, tuple[int, set[Path]]]:
    """Version and files of every attack, defense and metric, of the cost in accuracy, and of the protocol."""
    from gradveil.attacks import lineup
    from gradveil.attacks import registry as attacks
    from gradveil.auditing import case, utility
    from gradveil.defenses import registry as defenses
    from gradveil.metrics import direct_look
    from gradveil.metrics.registry import registered

    shared, others = files(PROTOCOL) - files(PROTOCOL_WITHOUT), files(OTHERS)
    methods = {f"attack {c.name}": c for c in attacks} | {f"defense {c.name}": c for c in defenses}
    versions = {name: (cls.version, cls.__module__) for name, cls in methods.items()}
    versions |= {f"metric {m.name}": (m.version, m.measure.__module__) for m in registered()}
    versions["direct look"] = (direct_look.VERSION, direct_look.__name__)
    versions["line-up"] = (lineup.VERSION, "gradveil.attacks.lineup.line_up")
    own_files = {name: (version, files_of(module, shared | others)) for name, (version, module) in versions.items()}
    cost = (utility.VERSION, files(COST))
    return {"protocol": (case.PROTOCOL, shared), "cost in accuracy": cost, **dict(sorted(own_files.items()))}


def current() -> dict[str, dict[str, int | str]]:
    return {
        name: {"version": version, "fingerprint": fingerprint(p.read_text(encoding="utf-8") for p in sorted(paths))}
        for name, (version, paths) in covered().items()
    }


def main() -> None:
    sys.path.insert(0, str(SOURCE))
    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    after = current()
    RECORD.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name)} -> {after.get(name)}")
    import record_catalogue

    record_catalogue.main()


if __name__ == "__main__":
    main()
