"""Stores: versions, the OCI layout, folders and buckets, and the cache of blobs.

May import: freezer.artifact and below. Imports no torch.
Read first: store.py.
"""
