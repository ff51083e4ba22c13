"""Catalog: files, schema and entries, and registries as catalogs.

May import: pipeline.tracking and below.
Read first: catalog.py.
"""
