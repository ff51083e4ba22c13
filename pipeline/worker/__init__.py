"""Worker: the tasks that run on a node, the sandbox, its supervisor and its child.

May import: pipeline.sources and below.
Read first: tasks.py.
"""
