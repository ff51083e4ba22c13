#!/usr/bin/env bash
# Back up MLflow's database and artifacts, or restore both. Needs pg_dump and pg_restore, not older than the server, and rclone.
#
#     set -a; . infra/mlflow/.env; PGHOST=127.0.0.1; set +a
#     infra/mlflow/backup.sh save BACKUP                # the server may run
#     infra/mlflow/backup.sh restore BACKUP [DUMP]      # into an empty database; stop the server first. DUMP: default the newest
#
# BACKUP is a folder, or a bucket that the same credentials can write, such as :s3:backups/mlflow. It gets mlflow-TIME.dump for each
# backup, and one folder `artifacts` for all of them, from which nothing is ever deleted.
set -euo pipefail

if (($# < 2)) || [[ $1 != save && $1 != restore ]]; then
    echo "usage: $0 save BACKUP | $0 restore BACKUP [DUMP]" >&2
    exit 2
fi
backup=$2
artifacts=${MLFLOW_ARTIFACTS_DESTINATION/#s3:\/\//:s3:}

export RCLONE_S3_ENV_AUTH=true RCLONE_S3_NO_CHECK_BUCKET=true RCLONE_S3_REGION=$AWS_DEFAULT_REGION RCLONE_S3_PROVIDER=AWS
if [[ -n ${MLFLOW_S3_ENDPOINT_URL:-} ]]; then
    export RCLONE_S3_PROVIDER=Other RCLONE_S3_ENDPOINT=$MLFLOW_S3_ENDPOINT_URL
fi
if [[ -n ${AWS_CA_BUNDLE:-} ]]; then # which older versions of rclone cannot use
    export RCLONE_CA_CERT=$AWS_CA_BUNDLE
    unset AWS_CA_BUNDLE
fi

if [[ $1 == save ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    dump=mlflow-$(date -u +%Y-%m-%dT%H-%M-%SZ).dump
    # First the database: every file that it names was uploaded before, so the copy below contains it.
    pg_dump --format=custom --file="$work/$dump"
    rclone copy --update --use-server-modtime "$artifacts" "$backup/artifacts"
    rclone copy "$work/$dump" "$backup" # last: a dump in BACKUP has all its artifacts
    echo "saved $backup/$dump"
else
    dump=${3:-$(rclone lsf --include 'mlflow-*.dump' "$backup" | sort | tail -n 1)}
    if [[ -z $dump ]]; then
        echo "$backup has no mlflow-TIME.dump: expected a folder or bucket that '$0 save' wrote" >&2
        exit 1
    fi
    # First the database: it is restored as a whole or not at all, and not over another.
    rclone cat "$backup/$dump" | pg_restore --dbname="$PGDATABASE" --no-owner --single-transaction --exit-on-error
    rclone copy --ignore-times "$backup/artifacts" "$artifacts"
    echo "restored $backup/$dump"
fi
