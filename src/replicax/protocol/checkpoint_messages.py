"""Messages about checkpoints that parameter servers write and read themselves."""

from __future__ import annotations

from replicax.protocol.body import Body


class StoredRows(Body, frozen=True):
    """The rows of an array of a checkpoint that a part holds.

    Attributes:
      part: The number of the part.
      name: The name of the array.
      shape: The shape of the array.
      start: The row of the array that is the first of the part.
    """

    part: int
    name: str
    shape: tuple[int, ...]
    start: int


class SaveParts(Body, frozen=True):
    """Writes parts into a checkpoint directory that the server shares; answered by `PartsSaved`."""

    directory: str
    rows: list[StoredRows]


class PartsSaved(Body, frozen=True):
    """The reply to `SaveParts`: what the manifest must contain about the parts, as JSON."""

    manifest: bytes


class LoadParts(Body, frozen=True):
    """Reads parts from a checkpoint that the server shares; answered by `Done`.

    Attributes:
      path: The checkpoint.
      rows: What to read.
      is_check: Whether to compare checksums only, and change nothing.
    """

    path: str
    rows: list[StoredRows]
    is_check: bool
