"""What the files of this project keep to, whoever writes them."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
LONGEST = 420  # lines

# Written apart, so that this file does not hold what it looks for.
FOLDERS = ("work", "tmp", "home", "root", "mnt", "Users", "scratch", "var/folders")
MACHINE = re.compile(r"(?<![\w.~$}\])/-])/(?:" + "|".join(FOLDERS) + r")/[\w.-]")
HOSTS = re.compile(
    "|".join(
        [
            "arti" + "factory",
            "ne" + "xus",
            "dev" + "pi",
            "index" + "-url",
            r"pypi\." + r"(?!org\b)",
            "code" + "artifact",
        ]
    )
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
    """Every line of text that is tracked, with where it stands."""
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture or an archive
            continue
        found += [(f"{path.relative_to(ROOT)}:{i}", line) for i, line in enumerate(text.splitlines(), start=1)]
    return found


def calls(tree: ast.AST) -> list[tuple[str, dict[str, object]]]:
    """Every call as its dotted name and the constants it is given by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
            found.append((ast.unparse(node.func), given))
    return found


def imports(tree: ast.AST) -> set[str]:
    """The packages that a file imports."""
    named = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    named += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in named}


@pytest.fixture(params=SOURCE, ids=lambda p: str(p.relative_to(ROOT)))
def tree(request: pytest.FixtureRequest) -> ast.AST:
    return ast.parse(request.param.read_text(encoding="utf-8"), filename=str(request.param))


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
    users = [p for p in SOURCE if "torchvision" in imports(ast.parse(p.read_text(encoding="utf-8")))]
    assert [str(p.relative_to(ROOT / "src" / "gradveil")) for p in users] in ([], ["data/readers/vision.py"])


def test_nothing_unpickles(tree: ast.AST) -> None:
    assert not imports(tree) & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for name, given in calls(tree):
        if name.endswith("torch.load"):
            assert given.get("weights_only") is True, "torch.load without weights_only=True"
        if name in ("np.load", "numpy.load"):
            assert given.get("allow_pickle") is False, "numpy.load must say allow_pickle=False"
        assert given.get("allow_pickle") is not True
        assert name not in ("eval", "exec")


def test_no_source_file_is_too_long() -> None:
    sizes = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCE}
    assert not {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > LONGEST}


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
