"""Timing: sample latency and measure how much other processes disturb it.

May import: freezer.runtime and below.
Read first: sampling.py.
"""
