"""Docstrings of registered methods and public metrics: `Args` names every setting, and the `Example` runs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil import metrics
from gradveil.core.settings import Registry
from gradveil.defenses.data.loda import extractors
from gradveil.defenses.registry import registry as defenses
from gradveil.metrics.registry import registered
from gradveil.models import MODELS, build

MEASURES = {metric.name: metric.measure for metric in registered()}
PUBLIC = {name: getattr(metrics, name) for name in metrics.__all__ if inspect.isfunction(getattr(metrics, name))}


def section(text: str, title: str) -> list[str]:
    """The lines of a section, without its indentation."""
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    return inspect.cleandoc(match[1]).splitlines() if match else []


def arguments(text: str) -> list[str]:
    """The names that the section `Args` explains; a line may explain several."""
    heads = [line.partition(":")[0] for line in section(text, "Args") if not line.startswith(" ")]
    return [name.strip() for head in heads for name in head.split(",")]


def example(text: str) -> str:
    lines = section(text, "Example")
    return "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))


def settings_of(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def check(cls: type, registry: Registry, run: Callable[[str], object]) -> None:
    text = inspect.getdoc(cls) or ""
    assert arguments(text) == settings_of(cls)
    code = example(text)
    assert code, "no Example"
    specs = [spec for spec in re.findall(r'"([^"]*)"', code) if re.split("[:+]", spec)[0] == cls.name]
    assert specs, f"no spec of {cls.name} in: {code}"
    assert isinstance(registry.parse(specs[0]), cls)
    run(code)


def test_the_parts_of_a_docstring_are_read() -> None:
    text = inspect.cleandoc(
        """First line.

        Args:
            a, b: two settings,
                explained on two lines: with a colon.
            c: a third one.

        Example:
            >>> f("x:a=1",
            ...   2)
        """
    )
    assert arguments(text) == ["a", "b", "c"]
    assert example(text) == 'f("x:a=1",\n  2)'
    assert arguments("Args: none.") == []


@pytest.mark.parametrize("name", MODELS.names())
def test_a_model(name: str) -> None:
    def run(code: str) -> None:
        assert isinstance(eval(code, {"build": build}), nn.Module)

    check(MODELS[name], MODELS, run)


@pytest.mark.parametrize("name", defenses.names())
def test_a_defense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extractors, "STEPS", 20)
    rng = torch.Generator().manual_seed(0)
    x, x_public = torch.rand(2, 24, 1, 16, 16, generator=rng)
    y = y_public = torch.arange(24) % 3
    model = build("cnn", input_shape=(1, 16, 16), num_classes=3)
    names = {"gv": gv, "model": model, "x": x, "y": y, "x_public": x_public, "y_public": y_public}

    def run(code: str) -> None:
        shield = eval(code, names)
        shield.backward(x[:4], y[:4])
        assert all(p.grad is not None and p.grad.isfinite().all() for p in shield.model.parameters())

    check(defenses[name], defenses, run)


@pytest.mark.parametrize("function", (MEASURES | PUBLIC).values(), ids=MEASURES | PUBLIC)
def test_a_metric(function: Callable[..., object]) -> None:
    assert arguments(inspect.getdoc(function) or "") == list(inspect.signature(function).parameters)
