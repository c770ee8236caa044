from __future__ import annotations

import numpy as np
import pytest

from gradveil.cli import main


@pytest.fixture
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """120 small grey images of three classes, as the path of an archive."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, images=random.integers(0, 256, (120, 8, 8), dtype=np.uint8), labels=np.arange(120) % 3)
    return str(path)


@pytest.fixture
def gradveil(capfd: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """A command in this process: its exit code, what it printed, and what it complained of."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capfd.readouterr()
        return code, out, err

    return run
