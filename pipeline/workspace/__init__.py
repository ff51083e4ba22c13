"""Workspace: folders of work in progress, checksums of candidates, processes.

May import: pipeline.failures and below.
Read first: workspace.py.
"""
