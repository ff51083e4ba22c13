"""Cluster: connection, nodes, tasks, coordination of campaigns, autoscaling, job submission. The
only package that imports ray.

May import: pipeline.ledger and below.
Read first: ray_cluster.py.
"""
