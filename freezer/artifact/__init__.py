"""Artifacts: the manifest, the folder, which payload serves a call, signatures, the freezing report, and rendering for people.

May import: freezer.hardware and below. Imports no torch.
Read first: manifest.py.
"""
