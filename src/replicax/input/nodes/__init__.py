"""Grain datasets and iterators behind the steps of `rx.data.Dataset`.

Grain takes a second to import, so these modules are imported when the first dataset is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicax.foundation import lazy

if TYPE_CHECKING:
    from replicax.input.nodes import combined as combined
    from replicax.input.nodes import files as files
    from replicax.input.nodes import indexed as indexed
    from replicax.input.nodes import streams as streams
else:
    combined = lazy.module("replicax.input.nodes.combined")
    files = lazy.module("replicax.input.nodes.files")
    indexed = lazy.module("replicax.input.nodes.indexed")
    streams = lazy.module("replicax.input.nodes.streams")
