"""How long work reports how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all
Steps = Callable[[int, int], None]  # steps done, steps in all
