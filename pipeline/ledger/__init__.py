"""Ledger: append-only segments, the lease, the campaign record, and the mirror of a bucket.

May import: pipeline.workspace and below.
Read first: ledger.py.
"""
