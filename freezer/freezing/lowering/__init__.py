"""Lowering: turn a captured graph into a payload. One package or module per backend.

May import: freezer.freezing.capture and below.
Read first: lowerings.py.
"""
