"""Scheduling: the state machine of items, queues, the fleet and the executor.

May import: pipeline.worker and below.
Read first: item_state.py, then executor.py.
"""
