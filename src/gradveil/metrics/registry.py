"""Metrics by name: `@metric("psnr")` registers a function of true and rebuilt images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from gradveil.core.settings import import_all

_Function = TypeVar("_Function", bound=Callable[..., Tensor | None])


@dataclass(frozen=True)
class Metric:
    """A measure of rebuilt images.

    Args:
        measure: takes true and rebuilt images (n × C × H × W, in [0, 1]) and returns n values; None where it cannot measure.
        version: to be raised when the values change.
    """

    name: str
    measure: Callable[..., Tensor | None]
    version: int


_METRICS: dict[str, Metric] = {}


def metric(name: str, *, version: int = 1) -> Callable[[_Function], _Function]:
    """Register a function as a metric under `name`. Every attack is scored with it."""

    def add(measure: _Function) -> _Function:
        if name in _METRICS and _METRICS[name].measure.__qualname__ != measure.__qualname__:
            raise ValueError(f"two metrics are named '{name}'")
        _METRICS[name] = Metric(name, measure, version)
        return measure

    return add


def registered() -> list[Metric]:
    """Every metric, in the order of their names."""
    import_all("gradveil.metrics")
    return [_METRICS[name] for name in sorted(_METRICS)]
