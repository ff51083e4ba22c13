"""Worker: what runs on a node. Tasks, the sandbox, its supervisor and its child.

May import: pipeline.sources and below.
Read first: tasks.py.
"""
