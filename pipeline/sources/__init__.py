"""Sources: resolve what an entry names, and bring it to the workers.

May import: pipeline.planning and below.
Read first: materials.py.
"""
