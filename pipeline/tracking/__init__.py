"""Tracking: campaigns and the model registry in MLflow, projected from the ledger. The only package
that imports mlflow.

May import: pipeline.cluster and below.
Read first: projection.py.
"""
