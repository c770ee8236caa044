"""No defense: the control that every other defense is compared with."""

from gradveil.core.settings import settings
from gradveil.defenses import Defense, defense


@defense("none")
@settings
class NoDefense(Defense):
    """Send the update unchanged.

    Example:
        >>> gv.protect(model, "none", data=(x, y))
    """
