"""Docstrings of registered methods and public metrics: `Args` names every setting, and the `Example` runs."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import shlex
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil import metrics
from gradveil.attacks.registry import registry as attacks
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
    """The names that `Args` explains, line by line, or in the short form `Args: a, b as for …; c: …`."""
    heads = [line.partition(":")[0] for line in section(text, "Args") if not line.startswith(" ")]
    if short := re.search(r"^Args: (.*)$", text, re.MULTILINE):
        heads = re.findall(r"(?:^|;)([^:;]*?)(?:: | as for )", short[1])
    return [re.sub(r"\(.*?\)", "", name).strip() for head in heads for name in head.split(",")]


def example(text: str) -> str:
    lines = section(text, "Example")
    return "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))


def settings_of(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def check(cls: type, registry: Registry, run: Callable[[str], object]) -> None:
    text = inspect.getdoc(cls) or ""
    assert sorted(arguments(text)) == sorted(settings_of(cls))
    if command := re.search(r"^Example: (gradveil audit .*)$", text, re.MULTILINE):
        words = itertools.pairwise(shlex.split(command[1]))
        specs = {option: spec for option, spec in words if option in ("--model", "--defense", "--attack")}
        assert isinstance(registry.parse(specs[f"--{registry.kind}"]), cls)
        for kind in (MODELS, defenses, attacks):
            if not re.match(r"[\w.]+\.\w+:", specs.get(f"--{kind.kind}", "a.b:own")):  # else a class of the user
                assert kind.parse(specs[f"--{kind.kind}"])
        return
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
    assert arguments("Args: a (1 by default), b as for `x`; c: one; or two.") == ["a", "b", "c"]


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


@pytest.mark.parametrize("name", attacks.names())
def test_an_attack(name: str) -> None:
    check(attacks[name], attacks, lambda code: compile(code, name, "eval"))


@pytest.mark.parametrize("function", (MEASURES | PUBLIC).values(), ids=MEASURES | PUBLIC)
def test_a_metric(function: Callable[..., object]) -> None:
    assert arguments(inspect.getdoc(function) or "") == list(inspect.signature(function).parameters)
