"""A simulated engine: what tests, demo, benches and trace replays run on.

The core (`cache`, `naming`, `engine`, `timing`) is pure and is driven step by step, in real time by
`driver` under `server`, or in virtual time by whoever likes. It behaves as a recorded vLLM does;
the contract test `test_sim_against_captures` holds it to that.
"""

from kvrouter.sim.engine import EngineCore, EngineRequest, Output, Step, StepResult
from kvrouter.sim.faults import Faults
from kvrouter.sim.server import SimServer
from kvrouter.sim.settings import CoreSettings, SettingsError, SimSettings
from kvrouter.sim.timing import LinearTiming, PolynomialTiming, StepLoad, TimingModel

__all__ = [
    "CoreSettings",
    "EngineCore",
    "EngineRequest",
    "Faults",
    "LinearTiming",
    "Output",
    "PolynomialTiming",
    "SettingsError",
    "SimServer",
    "SimSettings",
    "Step",
    "StepLoad",
    "StepResult",
    "TimingModel",
]
