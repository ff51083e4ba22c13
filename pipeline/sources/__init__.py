"""Sources: resolve the sources of entries, and bring them to the workers.

May import: pipeline.planning and below.
Read first: materials.py.
"""
