# What serves artifacts, without a compiler: `deployment` has the wheel alone, `service` also the HTTP service of infra/serving.

# In production, name the base by its digest.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt ./
# If not empty: the version of torch, instead of that of constraints.txt.
ARG TORCH=
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    sed --in-place "${TORCH:+s/^torch==.*/torch==${TORCH}/}" constraints.txt \
    && python -m venv /opt/pip \
    && /opt/pip/bin/pip install --no-cache-dir --constraint constraints.txt pip \
    && python -m venv --without-pip /opt/coldpress
# torch, engines (onnxruntime, openvino), signatures (signing), buckets (stores) and registries (registry). Without torch, payloads of
# engines serve.
ARG EXTRAS=torch,onnxruntime,openvino,signing,stores,registry
# For GPUs https://download.pytorch.org/whl/cu130. If empty: the indexes of pip's configuration.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    case ",${EXTRAS}," in *,torch,*) ;; *) exit 0 ;; esac \
    && /opt/pip/bin/pip --python /opt/coldpress/bin/python install --no-cache-dir --constraint constraints.txt \
    ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
COPY LICENSE README.md pyproject.toml ./
COPY freezer freezer
# Of torch, headers and the tests of its C++ code are removed. bin/torch_shm_manager is needed by its import.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/pip/bin/pip --python /opt/coldpress/bin/python install --no-cache-dir --constraint constraints.txt \
    --build-constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}" \
    && rm -rf /opt/coldpress/lib/python3*/site-packages/torch/include /opt/coldpress/lib/python3*/site-packages/torch/test \
    && find /opt/coldpress/lib/python3*/site-packages -path '*/torch/bin/*' ! -name torch_shm_manager -delete

FROM ${BASE} AS deployment
RUN useradd --uid 10001 --create-home coldpress
COPY --from=build /opt/coldpress /opt/coldpress
WORKDIR /app
ENV PATH=/opt/coldpress/bin:$PATH
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="coldpress-deployment" \
      org.opencontainers.image.description="Loads artifacts of Coldpress; no compiler" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
HEALTHCHECK --interval=10m --timeout=60s CMD ["coldpress", "doctor"]
CMD ["coldpress", "doctor"]

FROM deployment AS service
USER 0:0
COPY constraints.txt ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip --python /opt/coldpress/bin/python install --no-cache-dir --constraint constraints.txt \
    fastapi httptools prometheus-client uvicorn uvloop
COPY infra/__init__.py infra/
COPY infra/serving/*.py infra/serving/
LABEL org.opencontainers.image.title="coldpress-serve" \
      org.opencontainers.image.description="HTTP service for one model of a Coldpress store"
USER 10001:10001
ENV PORT=8000 PYTHONPATH=/app
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["python", "-c", "import os, urllib.request as http; http.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/ready', timeout=5)"]
CMD ["coldpress", "serve", "--help"]
