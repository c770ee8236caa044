"""The line-up: which of m candidate images was in the batch?"""

from gradveil.attacks.lineup.line_up import VERSION, Candidates, LineUp

__all__ = ["VERSION", "Candidates", "LineUp"]
