"""Attacks by name: `@attack("ig")` puts one in, `parse` reads `ig:steps=2000,tv=1e-3`."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import pydantic
from typing_extensions import dataclass_transform

from gradveil.attacks.base import Attack, Targets
from gradveil.core.errors import UserError
from gradveil.core.settings import Registry, settings
from gradveil.defenses.base import Defense

registry: Registry[Attack] = Registry("attack", package="gradveil.attacks")
A = TypeVar("A", bound=Attack)


@dataclass_transform(frozen_default=True, field_specifiers=(pydantic.Field, dataclasses.field))
def attack(
    name: str,
    *,
    needs: set[str] | None = None,
    against: tuple[type[Defense], ...] = (),
    targets: Targets = "classes",
    version: int = 1,
) -> Callable[[type[A]], type[A]]:
    """Make the class's fields the settings of an attack, and register it under `name`.

    Args:
        needs: the knowledge without which it cannot run: `labels`, `public`, `secrets` or `secret:NAME`.
        against: the classes of defenses that it is built to break; see `gradveil.attacks.suite`.
        targets: what it does where targets are no class numbers, see `Attack.targets`.
        version: raised when the results change.
    """
    facts = {"against": against, "targets": targets, "version": version}
    register = registry.register(name, needs=frozenset(needs or ()), **facts)

    def add(cls: type[A]) -> type[A]:
        made = cls if "__dataclass_fields__" in vars(cls) else settings(cls)
        register(made)
        return made

    return add


def parse(text: str | Attack) -> Attack:
    """The attack that `text` writes; an instance passes through."""
    method = text if isinstance(text, Attack) else registry.parse(text)
    if not isinstance(method, Attack):
        raise UserError(f"'{text}' is not an attack: its class does not derive from gradveil.Attack.")
    registry.check_name(method)
    return method
