"""Attacks by name: `@attack("ig")` puts one in, `parse` reads `ig:steps=2000,tv=1e-3`."""

from __future__ import annotations

from collections.abc import Callable

from gradveil.attacks.base import Attack, Targets
from gradveil.core.errors import UserError
from gradveil.core.settings import Registry

registry: Registry[Attack] = Registry("attack", package="gradveil.attacks")


def attack(
    name: str, *, needs: set[str] | None = None, adaptive: bool = False, targets: Targets = "classes", version: int = 1
) -> Callable[[type], type]:
    """Register an attack under `name`; `needs` names the knowledge without which it cannot run, `targets` what it does
    where targets are no class numbers (see `Attack.targets`). `version` is to be raised when the results change."""
    return registry.register(name, needs=frozenset(needs or ()), adaptive=adaptive, targets=targets, version=version)


def parse(text: str | Attack) -> Attack:
    """The attack that `text` writes; an instance passes through."""
    found = text if isinstance(text, Attack) else registry.parse(text)
    if not isinstance(found, Attack):
        raise UserError(f"'{text}' is not an attack: its class does not derive from gradveil.Attack.")
    return found
