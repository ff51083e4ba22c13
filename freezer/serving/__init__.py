"""Serve artifacts: resolve a reference, select an artifact, verify it, open it, run the canary.

May import: freezer.timing and below; never freezer.freezing.
Read first: load.py.
"""
