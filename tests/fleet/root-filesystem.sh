#!/bin/bash
# Makes the root file system of the emulated Arm machines, once: Debian for arm64, and the packages of a worker image in /opt/venv.
# Usage, as root: root-filesystem.sh ROOT PYTHON, where PYTHON has pip and is of the version of Debian's python3.
# It is made again when those packages, constraints.txt or this file change.
set -euo pipefail
root=$(realpath -m "$1") python=$(realpath -s "$2")
cd "$(dirname "$0")/../.."
(($(id -u) == 0)) || { echo "the root file system is made as root: sudo make test-fleet" >&2; exit 2; }

{ command -v debootstrap && command -v qemu-aarch64-static && command -v cmake && command -v aarch64-linux-gnu-g++; } > /dev/null || {
    apt-get update -qq
    apt-get install -qq --no-install-recommends debootstrap qemu-user-static cmake make g++-aarch64-linux-gnu
} > /dev/null

# The kernel starts qemu for every arm64 program; F opens qemu now, so that it is found in the root file system, too.
binfmt=/proc/sys/fs/binfmt_misc
mountpoint -q $binfmt || mount -t binfmt_misc binfmt_misc $binfmt
[[ -e $binfmt/qemu-aarch64 ]] || {
    magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    echo ":qemu-aarch64:M::$magic:$mask:/usr/bin/qemu-aarch64-static:F" > $binfmt/register
}

# OpenVINO's thread library reads /sys, which is this machine's, and dies of SIGSEGV.
requirements=$("$python" - <<'PROGRAM'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
names = list(project["project"]["dependencies"])
for extra in ("torch", "stores"):
    names += project["project"]["optional-dependencies"][extra]
for group in ("pipeline", "serving"):
    names += project["dependency-groups"][group]
print(*(name for name in names if not name.startswith("openvino")), "hatchling", sep="\n")
PROGRAM
)
made_of=$(cat constraints.txt tests/fleet/root-filesystem.sh - <<< "$requirements" | sha256sum)
[[ -e $root/made-of && $(< "$root/made-of") == "$made_of" ]] && exit
[[ ! -e $root || -e $root/debootstrap || -e $root/opt/venv ]] || { echo "$root is something else: name another folder" >&2; exit 2; }
rm -f "$root/made-of"

if [[ ! -e $root/usr/include/nlohmann || -e $root/debootstrap ]]; then
    echo "making $root: Debian for arm64, some 6 minutes"
    rm -rf --one-file-system "$root"
    mkdir -p "$root"
    debootstrap --arch=arm64 --foreign --variant=minbase \
        --include=python3,python3-venv,python3-pip,g++,ca-certificates,libgomp1,nlohmann-json3-dev,libssl-dev \
        bookworm "$root" > "$root.log"
    unshare --mount chroot "$root" /debootstrap/debootstrap --second-stage >> "$root.log"
fi

echo "installing packages for arm64 into $root, some 3 minutes"
platforms=(--platform manylinux2014_aarch64)
for ((minor = 17; minor < 40; minor++)); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
packages=$root/opt/venv/lib/python3.11/site-packages
rm -rf "$root/opt/venv"/*
mkdir -p "$root/opt/venv"
"$python" -m pip install --quiet --no-input --no-warn-conflicts --target "$packages" --python-version 3.11 --implementation cp \
    "${platforms[@]}" --only-binary=:all: --constraint constraints.txt --requirement <(echo "$requirements")
chroot "$root" python3 -m venv /opt/venv
sed -i '1s|^#!.*|#!/opt/venv/bin/python|' "$packages"/bin/*
mv "$packages"/bin/* "$root/opt/venv/bin/"
echo "$made_of" > "$root/made-of"
