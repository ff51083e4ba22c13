"""Runtime: call an opened artifact. Input contract, payload loaders, threads, precision, state.

May import: freezer.store and below, and torch.
Read first: frozen_model.py.
"""
