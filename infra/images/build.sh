#!/usr/bin/env bash
# Build an image of Coldpress. Usage: infra/images/build.sh IMAGE [option of the builder ...]
# BUILDER is docker (default), podman or buildah. TORCH is another version of torch than that of constraints.txt, and VARIANT names a build
# with other options: the image is only tagged IMAGE:VERSION-torchTORCH-VARIANT, so it replaces no other.
set -euo pipefail
cd "$(dirname "$0")/../.."

image=${1:?usage: infra/images/build.sh IMAGE [option of the builder ...]}
shift
case $image in
    coldpress-head) file=campaign target=head ;;
    coldpress-worker) file=campaign target=worker ;;
    coldpress-worker-cuda) file=campaign target=worker && set -- --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 "$@" ;;
    coldpress-mlflow) file=mlflow target=mlflow ;;
    coldpress-deployment) file=deployment target=deployment ;;
    coldpress-serve) file=deployment target=service ;;
    *) echo "no image '$image'; expected coldpress-{head,worker,worker-cuda,mlflow,deployment,serve}" >&2 && exit 2 ;;
esac

builder=${BUILDER:-docker}
# The OCI format has no health checks; docker always builds its own format.
[[ $builder == docker ]] || set -- --format docker "$@"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
suffix=${TORCH:+-torch$TORCH}${VARIANT:+-$VARIANT}
set -- --tag "$image:$version$suffix" ${TORCH:+--build-arg "TORCH=$TORCH"} "$@"
[[ -n $suffix ]] || set -- --tag "$image" "$@"
exec "$builder" build --file "infra/images/$file.Dockerfile" --target "$target" \
    --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD)" "$@" .
