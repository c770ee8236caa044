"""What the files of this project keep to, whoever writes them."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in SOURCE}

# How long a source file may be, in lines.
LONGEST = 400
MEDIAN = 100
MOST_PARAMETERS = 8

# CONTRIBUTING lists names that do not say what they hold, and words that stand nowhere.
_WORDS = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
VAGUE = set(re.findall(r"`(\w+)`", _WORDS.partition("These names say nothing")[2].partition(".")[0]))
BANNED = re.findall(r"\w+", _WORDS.partition("used nowhere in the source:")[2].partition(".")[0])

# Written apart, so that this file does not hold what it looks for.
FOLDERS = ("work", "tmp", "home", "root", "mnt", "Users", "scratch", "var/folders")
MACHINE = re.compile(r"(?<![\w.~$}\])/-])/(?:" + "|".join(FOLDERS) + r")/[\w.-]")
HOSTS = re.compile(
    "|".join(["arti" + "factory", "ne" + "xus", "dev" + "pi", "index" + "-url", r"pypi\." + r"(?!org\b)", "code" + "artifact"])
)


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout: there is no list of tracked files")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def lines() -> list[tuple[str, str]]:
    """Every line of text that is tracked, with its file and number."""
    numbered = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture or an archive
            continue
        numbered += [(f"{path.relative_to(ROOT)}:{i}", line) for i, line in enumerate(text.splitlines(), start=1)]
    return numbered


def calls(tree: ast.AST) -> list[tuple[str, dict[str, object]]]:
    """Every call as its dotted name and the constants among its keyword arguments."""
    return [
        (ast.unparse(node.func), {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)})
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def imports(tree: ast.AST) -> set[str]:
    """The packages that a file imports."""
    named = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    named += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in named}


@pytest.fixture(params=SOURCE, ids=lambda p: str(p.relative_to(ROOT)))
def tree(request: pytest.FixtureRequest) -> ast.AST:
    return TREES[request.param]


def test_the_patterns_find_what_they_look_for() -> None:
    for text in ("see /" + "work/x", '"/' + 'tmp/u"', "=/" + "home/me", "`/" + "root/.cache`"):
        assert MACHINE.search(text), text
    for text in ("https://example.org/" + "home/x", "docs/" + "work/x.md", "tests/" + "tmp/x", "$HOME/" + "tmp/x"):
        assert not MACHINE.search(text), text
    assert HOSTS.search("--index" + "-url=https://x")


def test_no_file_names_a_machines_folders_or_a_package_mirror() -> None:
    assert not [f"{where}: {line.strip()}" for where, line in lines() if MACHINE.search(line)]
    assert not [f"{where}: {line.strip()}" for where, line in lines() if HOSTS.search(line)]


def test_torchvision_is_imported_by_its_reader_alone() -> None:
    users = [p for p in SOURCE if "torchvision" in imports(TREES[p])]
    assert {str(p.relative_to(ROOT / "src" / "gradveil")) for p in users} <= {"data/readers/vision.py", "models/vision.py"}


def test_nothing_unpickles(tree: ast.AST) -> None:
    assert not imports(tree) & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for name, arguments in calls(tree):
        if name.endswith("torch.load"):
            assert arguments.get("weights_only") is True, "torch.load without weights_only=True"
        if name in ("np.load", "numpy.load"):
            assert arguments.get("allow_pickle") is False, "numpy.load must say allow_pickle=False"
        assert arguments.get("allow_pickle") is not True
        assert name not in ("eval", "exec")


def test_source_files_are_short() -> None:
    sizes = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCE}
    assert not {name: size for name, size in sizes.items() if size > LONGEST}
    assert statistics.median(sizes.values()) <= MEDIAN


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name, methods and inner functions too."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}.{node.name}" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        yield from functions(node, name)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    a = node.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *(extra for extra in (a.vararg, a.kwarg) if extra)]


def long_signatures(tree: ast.AST, module: str) -> set[str]:
    """Functions with too many named parameters, `self` counted. Settings classes have no `__init__` of their own."""
    return {
        name
        for name, node in functions(tree, module)
        if len(parameters(node)) - bool(node.args.vararg) - bool(node.args.kwarg) > MOST_PARAMETERS
    }


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def test_no_function_has_too_many_parameters() -> None:
    long = set().union(*(long_signatures(tree, module_name(path)) for path, tree in TREES.items()))
    assert not long, "put what belongs together into one object"


def vague_names(tree: ast.AST) -> list[str]:
    """Variables, parameters, functions and attributes that are bound to a name of `VAGUE`."""
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names += [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    names += [n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    names += [n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)]
    return [name for name in names if name in VAGUE]


def constructions_of_client(tree: ast.AST) -> list[str]:
    return [name for name, _ in calls(tree) if name.rpartition(".")[2] == "Client"]


def occurrences(pattern: str) -> Callable[[ast.AST, str], int]:
    return lambda tree, text: len(re.findall(pattern, text))


# What is counted in the source, and how often it may occur there.
LIMITS: dict[str, tuple[Callable[[ast.AST, str], int], int]] = {
    "lines": (lambda tree, text: len(text.splitlines()), 39_000),
    "dict[str, Any]": (occurrences(r"dict\[str, Any\]"), 25),
    "type: ignore": (occurrences(r"type: ignore"), 15),
    "vague names": (lambda tree, text: len(vague_names(tree)), 0),
    "banned words": (occurrences(r"(?i)(?<![a-z])(?:" + "|".join(BANNED) + r")(?![a-z])"), 0),
    "Client(": (lambda tree, text: len(constructions_of_client(tree)), 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_source_keeps_the_limit(name: str) -> None:
    count, most = LIMITS[name]
    counts = {str(p.relative_to(ROOT)): count(tree, p.read_text(encoding="utf-8")) for p, tree in TREES.items()}
    assert sum(counts.values()) <= most, {file: n for file, n in counts.items() if n}


def test_the_counters_count() -> None:
    assert sorted(VAGUE) == ["found", "given", "known", "own", "some", "what"] and "naught" in BANNED
    text = "def f(self, a, found: dict[str, Any]):\n    own = Client(a)  # type: ignore\n    self.given = x.Client(_NAUGHT)\n"
    tree = ast.parse(text)
    assert [count(tree, text) for count, _ in LIMITS.values()] == [3, 1, 1, 3, 1, 2]
    nine = "class A:\n    def m(self, a, b, c, d, e, f, g, h): ...\n    def n(self, a, b, c, d, e, f, g, *h, **i): ...\n"
    assert long_signatures(ast.parse(nine), "x") == {"x.A.m"}


def test_every_source_file_says_what_it_is_for(tree: ast.AST) -> None:
    assert isinstance(tree, ast.Module)
    assert ast.get_docstring(tree) or not tree.body


def test_no_exception_is_swallowed_whole(tree: ast.AST) -> None:
    """No bare `except:`, and none that catches everything and does nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"
            wide = ast.unparse(node.type) in ("Exception", "BaseException")
            idle = all(isinstance(part, (ast.Pass, ast.Continue)) for part in node.body)
            assert not (wide and idle), f"swallowed in line {node.lineno}"


def test_nobody_seeds_the_global_stream_without_putting_it_back() -> None:
    """Randomness is explicit; a global seed stands only inside `fork_rng`."""
    for path in SOURCE:
        text = path.read_text(encoding="utf-8")
        if re.search(r"(torch|default_generator)\.manual_seed\(", text):
            assert "fork_rng" in text, path
        assert not re.search(r"\b(np|numpy)\.random\.seed\(|(?<![\w.])random\.seed\(", text), path
