#!/bin/sh
# Starts a Ray worker with the labels, CPUs, GPUs and memory of this container, in the foreground: the command of the worker image.
# HEAD is the head's address; arguments are further options of `ray start`.
# KubeRay runs its own `ray start` instead: labels and environment are then in the manifest.
set -eu
environment=$(coldpress worker-labels --environment)
arguments=$(coldpress worker-labels)
# shellcheck disable=SC2086  # words without spaces
exec env $environment ray start --block --address="$HEAD" $arguments "$@"
