"""Failures: classify exceptions, and decide what is retried.

May import: pipeline.records.
Read first: policy.py.
"""
