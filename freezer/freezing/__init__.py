"""Freezing: make artifacts. Capture, lower, validate, package.

May import: freezer.timing and below; never freezer.serving.
Read first: freeze.py.
"""
