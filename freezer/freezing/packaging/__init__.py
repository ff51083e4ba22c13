"""Packaging: assemble the artifact folder, with its evidence and the cold-start measurement.

May import: freezer.freezing.validation and below.
Read first: assemble.py.
"""
