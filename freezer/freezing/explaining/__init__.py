"""Explaining: at which stage and node the drift of a candidate enters, and what may help.

May import: freezer.freezing.drift and below.
Read first: explain.py.
"""

from freezer.freezing.explaining.engines import run_openvino
from freezer.freezing.explaining.explain import explain_drift, explain_recipe
from freezer.freezing.explaining.values import GraphReference

__all__ = [
    "GraphReference",
    "explain_drift",
    "explain_recipe",
    "run_openvino",
]
