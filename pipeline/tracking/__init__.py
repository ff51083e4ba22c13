"""Tracking: what MLflow shows of a campaign, and the registry. A projection of the ledger; the only package that imports mlflow.

May import: pipeline.cluster and below.
Read first: projection.py.
"""
