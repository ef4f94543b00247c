"""All checks, by theme; importing this module registers them."""

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
    preemptions,
    recovery,
    safeguard_checks,
    stragglers,
    sync_groups,
)
from torture.checks import chosen as chosen

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
    sync_groups,
    preemptions,
    safeguard_checks,
)
