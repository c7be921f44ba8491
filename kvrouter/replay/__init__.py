"""Traces in virtual time: the router's own scheduler, load and index over simulated engines."""

from kvrouter.replay.bound import pooled_bound
from kvrouter.replay.fleet import FleetSettings, Progress, replay
from kvrouter.replay.result import Result, Spread
from kvrouter.replay.trace import Trace, TraceError, TraceRequest, read_trace

__all__ = [
    "FleetSettings",
    "Progress",
    "Result",
    "Spread",
    "Trace",
    "TraceError",
    "TraceRequest",
    "pooled_bound",
    "read_trace",
    "replay",
]
