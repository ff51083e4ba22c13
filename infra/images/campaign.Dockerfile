# The nodes of a Ray cluster that runs campaigns: `head`, which also runs submitted drivers, and `worker`. See README.md for commands.
#
# GPUs: the same `worker`, with torch from an index of CUDA wheels. These contain the CUDA libraries and the headers that Inductor
# compiles with, so an nvidia/cuda base would hold both twice; the driver comes from the host. It has not run on a GPU yet.

# The Python of all nodes must be the same. In production, name the base by its digest.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# --- The environment: what `make setup` installs, without what only development needs.
FROM ${BASE} AS build
WORKDIR /app
COPY constraints.txt ./
# If not empty: the version of torch, instead of that of constraints.txt.
ARG TORCH=
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    sed --in-place "${TORCH:+s/^torch==.*/torch==${TORCH}/}" constraints.txt \
    && python -m venv /opt/pip \
    && /opt/pip/bin/pip install --no-cache-dir --constraint constraints.txt pip \
    && python -m venv --without-pip /opt/coldpress
# For GPUs https://download.pytorch.org/whl/cu130. If empty: the indexes of pip's configuration.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/pip/bin/pip --python /opt/coldpress/bin/python install --no-cache-dir --constraint constraints.txt \
    ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
# An editable install needs no code: it only records that the code is in /app.
COPY LICENSE README.md pyproject.toml ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/pip/bin/pip --python /opt/coldpress/bin/python install --no-cache-dir --constraint constraints.txt \
    --build-constraint constraints.txt --editable ".[torch,stores,signing]" --group pipeline

# --- What head and worker share.
FROM ${BASE} AS node
# wget: KubeRay's probes use it, as the health checks below do.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home coldpress
COPY --from=build /opt/coldpress /opt/coldpress
WORKDIR /app
COPY freezer freezer
COPY jobs jobs
COPY pipeline pipeline
# Whoever reaches a cluster without a token runs code there. GitPython, which MLflow imports, warns of a missing git otherwise.
ENV PATH=/opt/coldpress/bin:$PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 GIT_PYTHON_REFRESH=quiet \
    MLFLOW_DISABLE_TELEMETRY=true
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM node AS head
LABEL org.opencontainers.image.title="coldpress-head" \
      org.opencontainers.image.description="Head of a Ray cluster, and drivers of Coldpress campaigns"
USER 10001:10001
EXPOSE 6379 8265
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["wget", "--tries=1", "--timeout=5", "--quiet", "--output-document=-", "http://127.0.0.1:8265/api/gcs_healthz"]
CMD ["ray", "start", "--head", "--block", "--port=6379", "--num-cpus=0", "--dashboard-host=0.0.0.0", "--object-store-memory=200000000"]

FROM node AS worker
# Compilers in order of preference. g++ also brings objdump: both build and check Inductor payloads.
ARG COMPILERS="g++ g++-11"
COPY infra/images/choose-compiler.sh /usr/local/bin/
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ${COMPILERS} \
    && rm -rf /var/lib/apt/lists/* \
    && PYTHONPATH=/app choose-compiler.sh ${COMPILERS}
COPY infra/images/worker.sh /usr/local/bin/coldpress-worker
# NVIDIA's container runtime reads its variables; others ignore them. Under Kubernetes the device plugin selects the GPUs.
ENV HEAD=coldpress-head:6379 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="coldpress-worker" \
      org.opencontainers.image.description="Worker of Coldpress campaigns: builds and judges artifacts"
USER 10001:10001
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["wget", "--tries=1", "--timeout=5", "--quiet", "--output-document=-", "http://127.0.0.1:52365/api/local_raylet_healthz"]
CMD ["coldpress-worker"]
