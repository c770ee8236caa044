"""What a line-up showed, beside the limit that a mechanism proves for it: a lower and an upper end of one risk."""

from gradveil.certification.certificate import Certificate
from gradveil.core.results import Rate, Record


class LineUpRisk(Record):
    """A second risk: someone who has m candidate images of a class asks which of them was in the batch.

    One image of every batch stands in a line-up. Nothing is rebuilt; candidates are compared by the updates they would cause.
    """

    m: int  # candidates, at the least
    identified: Rate  # victims that came first
    ranks: tuple[int, ...]  # per victim
    certificate: Certificate | None = None  # the limit that the defense proves for what was seen; None: it proves none

    @property
    def shown(self) -> bool:
        """Whether more victims were identified than guessing explains."""
        return self.identified.low > self.identified.chance

    @property
    def contradicts(self) -> bool:
        """Whether more were identified than the certificate allows: an error, here or in the mechanism."""
        return self.certificate is not None and self.identified.low > self.certificate.upper
