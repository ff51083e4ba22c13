"""Artifacts: manifest, folder, payload selection, signatures, freezing report, and rendering for
people.

May import: freezer.hardware and below. Imports no torch.
Read first: manifest.py.
"""
