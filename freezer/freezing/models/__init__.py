"""Models: load a source model, check it, and make its samples; state and randomness; the model
before it is frozen.

May import: freezer.freezing.diagnostics, freezer.timing and below.
Read first: subject.py.
"""
