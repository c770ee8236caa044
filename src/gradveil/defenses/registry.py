"""Defenses by name: `@defense("prune")` puts one in, `parse` reads `dcs2+prune:ratio=0.7`."""

from collections.abc import Callable, Sequence

from gradveil.core.errors import UserError
from gradveil.core.settings import Registry, split_chain
from gradveil.defenses.base import Chain, Defense

registry: Registry[Defense] = Registry("defense", package="gradveil.defenses")


def defense(name: str, counters: Sequence[str] = (), random: bool = False, version: int = 1) -> Callable[[type], type]:
    """Register a defense under `name`; `counters`: see `Defense.counters`. Raise `version` when results change."""
    return registry.register(name, counters=tuple(counters), random=random, version=version)


def parse(text: str | Defense) -> Defense:
    """The defense that `text` writes; an instance passes through."""
    if isinstance(text, Defense):
        for part in text.parts:
            registry.check_name(part)
        return text
    parts = [registry.parse(part) for part in split_chain(text)]
    for part in parts:
        if not isinstance(part, Defense):
            raise UserError(f"'{text}' is not a defense: its class does not derive from gradveil.Defense.")
        registry.check_name(part)
    return parts[0] if len(parts) == 1 else Chain(parts)
