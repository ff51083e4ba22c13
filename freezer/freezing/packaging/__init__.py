"""Packaging: assemble the artifact folder, with its evidence.

May import: freezer.freezing.validation and below.
Read first: assemble.py.
"""
