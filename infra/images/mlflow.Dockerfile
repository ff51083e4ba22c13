# An MLflow server for PostgreSQL and S3. It is configured by variables (MLFLOW_BACKEND_STORE_URI, MLFLOW_ARTIFACTS_DESTINATION,
# MLFLOW_SERVER_ALLOWED_HOSTS), so that passwords are in no command line. infra/mlflow starts it.

# In production, name the base by its digest.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python -m venv --without-pip /opt/mlflow \
    && pip --python /opt/mlflow/bin/python install --no-cache-dir --constraint constraints.txt "mlflow[auth]" boto3 psycopg2-binary

FROM ${BASE} AS mlflow
RUN useradd --uid 10001 --create-home mlflow
COPY --from=build /opt/mlflow /opt/mlflow
WORKDIR /home/mlflow
ENV PATH=/opt/mlflow/bin:$PATH GIT_PYTHON_REFRESH=quiet MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="coldpress-mlflow" \
      org.opencontainers.image.description="MLflow server for Coldpress campaigns" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
EXPOSE 5000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/health', timeout=5)"]
CMD ["mlflow", "server", "--host", "0.0.0.0", "--port", "5000"]
