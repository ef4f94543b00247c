"""What the closures of a simulated job do on a worker."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import cast

from replicax.foundation import runtime
from replicax.ps.client.variable_client import ParameterClient
from replicax.variables.remote import Read, RemoteVariable
from simulation.checks import Checks
from simulation.optimizer import SumOptimizer
from simulation.plan import Plan
from simulation.world import World

_stages: list[tuple[World, Plan, Checks]] = []


@contextlib.contextmanager
def staged(world: World, plan: Plan, checks: Checks) -> Iterator[None]:
    """Makes closures run in a simulation: workers get them by name, like those of a user."""
    _stages.append((world, plan, checks))
    try:
        yield
    finally:
        _stages.pop()


def step(variables: Sequence[RemoteVariable], optimizer: SumOptimizer | None, element: int) -> None:
    """Is sent to the workers by value, like each function of a user, and finds its history here."""
    sys.modules["simulation.closures"].run(variables, optimizer, element)


def run(variables: Sequence[RemoteVariable], optimizer: SumOptimizer | None, element: int) -> None:
    """Reads, computes for a while, and updates variables."""
    world, plan, checks = _stages[-1]
    work, client = plan.work_of(element), cast(ParameterClient, variables[0].client)
    incarnation = client._channels[0].incarnation
    process = world.current.process
    world.note(f"{process} starts {element}")
    if work.reads:
        checks.reads(element, incarnation)
        touched = {plan.servers[part] for part in work.parts}
        client.pull([Read(v) for v in variables if v.server in touched])
    runtime.sleep(work.seconds)
    for change in plan.changes(element, variables, optimizer):
        client.push([change])
    world.note(f"{process} has computed {element}")
    if work.fails:
        raise ValueError(f"{plan.name_of(element)} fails as planned")
