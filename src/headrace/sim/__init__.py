"""Physics and cameras behind one ``Simulation`` protocol."""

from headrace.sim.mujoco_sim import MujocoSim, default_threads
from headrace.sim.simulation import Simulation

__all__ = ["MujocoSim", "Simulation", "default_threads"]
