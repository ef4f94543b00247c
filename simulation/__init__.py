"""Deterministic simulation of a parameter-server cluster: histories that a seed replays."""

from simulation.faults import Faults as Faults
from simulation.run import History as History
from simulation.run import SimulationError as SimulationError
from simulation.run import simulate as simulate
