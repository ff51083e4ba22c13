"""Files: atomic writes, digests, downloads, buckets and safe paths.

May import: freezer.errors.
Read first: atomic.py.
"""
