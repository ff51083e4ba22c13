"""Failures: classify how a task ended, and decide what is retried.

May import: pipeline.records.
Read first: policy.py.
"""
