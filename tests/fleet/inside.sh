#!/bin/sh
# Runs a command on an emulated Arm machine: inside.sh ROOT FOLDER COMMAND...
# It sees FOLDER and this checkout at their own paths, and its mounts end with it. QEMU_CPU is the CPU.
set -eu
root=$1 folder=$2
checkout=$(realpath "$(dirname "$0")/../..")
shift 2
export ROOT="$root" FOLDER="$folder" CHECKOUT="$checkout"
export HOME=/root PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1
# shellcheck disable=SC2016  # the inner shell expands
exec unshare --mount --propagation private sh -euc '
    mkdir -p "$ROOT$FOLDER" "$ROOT$CHECKOUT"
    for place in /proc /dev "$CHECKOUT" "$FOLDER"; do mount --rbind "$place" "$ROOT$place"; done
    exec chroot "$ROOT" sh -euc "cd \"\$FOLDER\"; exec \"\$@\"" sh "$@"
' sh "$@"
