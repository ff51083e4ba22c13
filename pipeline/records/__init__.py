"""Records: outcomes, failures, figures and events that all other packages share.

May import: freezer.
Read first: outcome.py.
"""
