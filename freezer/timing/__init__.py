"""Timing: sample latency and measure how much other processes disturb it.

May import: freezer.runtime and below.
Read first: sampling.py.
"""

from freezer.timing.halving import Rivals
from freezer.timing.meters import CpuMeter, meter_of
from freezer.timing.sampling import MIN_SAMPLES, Sampling, policy_for, sample
from freezer.timing.speedups import Speedup, speedup

__all__ = [
    "MIN_SAMPLES",
    "CpuMeter",
    "Rivals",
    "Sampling",
    "Speedup",
    "meter_of",
    "policy_for",
    "sample",
    "speedup",
]
