"""Validation: reference, drift, latency, and the verdict.

May import: freezer.freezing.candidates and below.
Read first: judge.py.
"""
