"""Catalog: files, schema and entries, and a registry as a catalog.

May import: pipeline.tracking and below.
Read first: catalog.py.
"""
