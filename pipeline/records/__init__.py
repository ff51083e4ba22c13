"""Records: outcomes, events and facts that every other package passes around.

May import: freezer.
Read first: outcome.py.
"""
