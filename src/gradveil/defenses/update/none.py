"""No defense: the update leaves as it is. The control every other row is compared with."""

from __future__ import annotations

from gradveil.core.settings import settings
from gradveil.defenses.base import Defense
from gradveil.defenses.registry import defense


@defense("none")
@settings
class NoDefense(Defense):
    """Send the update unchanged."""
