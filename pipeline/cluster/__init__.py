"""Cluster: connection, nodes, tasks, autoscaling, job submission. The only package that imports
ray.

May import: pipeline.ledger and below.
Read first: ray_cluster.py.
"""

from pipeline.cluster.client import (
    check_address,
    connect,
    joined_address,
)
from pipeline.cluster.head_monitor import host_and_port, in_child
from pipeline.cluster.jobs_api import (
    Job,
    Jobs,
    job_prefix,
)
from pipeline.cluster.ray_cluster import (
    Ask,
    Cluster,
    Done,
    Handle,
    Node,
    classes_of,
)
from pipeline.cluster.working_dir import (
    PACKAGES,
    Upload,
    check_absolute,
    gather,
    in_job,
    stage,
)

__all__ = [
    "PACKAGES",
    "Ask",
    "Cluster",
    "Done",
    "Handle",
    "Job",
    "Jobs",
    "Node",
    "Upload",
    "check_absolute",
    "check_address",
    "classes_of",
    "connect",
    "gather",
    "host_and_port",
    "in_child",
    "in_job",
    "job_prefix",
    "joined_address",
    "stage",
]
