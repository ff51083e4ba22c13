"""MLflow, as a projection of the ledger: runs, summary, registry. mlflow is imported only in this package.

Everything here can be made again from the ledger, and every step may be repeated after a crash. Read projection.py first.
"""
