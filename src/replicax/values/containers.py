"""Which distributed value a component belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax

# The container of a component, by the component's id. Entries go when the container goes;
# `container_of` confirms a hit by identity, since ids are reused.
_containers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_components(container: Any, components: Sequence[Any]) -> None:
    """Remembers, for as long as `container` lives, that it owns these components."""
    for component in components:
        if isinstance(component, jax.Array):
            _containers[id(component)] = container


def container_of(component: Any) -> Any:
    """Returns the distributed value or variable of a component, else the component."""
    container = _containers.get(id(component))
    if container is not None and any(v is component for v in container.values):
        return container
    return getattr(component, "container", component)
