"""Workspace: folders of work in progress, checksums of candidates, process trees.

May import: pipeline.failures and below.
Read first: workspace.py.
"""
