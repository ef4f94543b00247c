"""All bars, by theme; importing this module registers them."""

from __future__ import annotations

from torture import (
    closures,
    consistency,
    coordinators,
    delivery,
    endurance,
    hostile,
    keys,
    launchers,
    partitions,
    recovery,
    saboteurs,
    stragglers,
)
from torture.bars import chosen as chosen

THEMES = (
    closures,
    stragglers,
    coordinators,
    delivery,
    partitions,
    consistency,
    recovery,
    hostile,
    keys,
    endurance,
    launchers,
    saboteurs,
)
