"""Types that many modules name in their signatures."""

from __future__ import annotations

from typing import Any, TypeAlias

# A nest of tuples, lists, dictionaries and registered nodes whose leaves are arrays or scalars. JAX
# itself has no narrower type for it.
Tree: TypeAlias = Any
