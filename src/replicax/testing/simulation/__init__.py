"""Deterministic simulation of a parameter-server cluster: histories that a seed replays."""

from replicax.testing.simulation.faults import Faults as Faults
from replicax.testing.simulation.run import History as History
from replicax.testing.simulation.run import SimulationError as SimulationError
from replicax.testing.simulation.run import simulate as simulate
