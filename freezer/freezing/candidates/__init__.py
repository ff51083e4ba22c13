"""Candidates: apply one recipe to one model.

May import: freezer.freezing.lowering and below.
Read first: build.py.
"""
