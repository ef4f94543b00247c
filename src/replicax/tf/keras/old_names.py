"""Small classes of earlier versions of Keras."""

from __future__ import annotations


class Reduction:
    """Ways to combine the losses of the examples of a batch.

    >>> Reduction.NONE, Reduction.AUTO
    ('none', 'auto')
    """

    AUTO = "auto"
    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"

    @classmethod
    def all(cls) -> tuple[str, ...]:
        """Returns all ways."""
        return (cls.AUTO, cls.NONE, cls.SUM, cls.SUM_OVER_BATCH_SIZE)

    @classmethod
    def validate(cls, key: str) -> None:
        """Raises ValueError for another value."""
        if key not in cls.all():
            raise ValueError(f"A reduction must be one of {cls.all()}, not {key!r}.")
