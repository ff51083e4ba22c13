"""Cluster: connect, nodes, tasks, coordination between campaigns, autoscaling, the jobs API. The only package that imports ray.

May import: pipeline.ledger and below.
Read first: ray_cluster.py.
"""
