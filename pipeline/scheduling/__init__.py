"""Scheduling: the queue, slots, the fleet and the executor.

May import: pipeline.worker and below.
Read first: executor.py.
"""
