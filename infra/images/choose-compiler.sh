#!/bin/sh
# Makes g++ the first of the given compilers that builds Inductor's code for every device class of this architecture.
# Usage: choose-compiler.sh g++ g++-11
set -eu
TMPDIR=$(mktemp --directory)
export TMPDIR
trap 'rm -r "$TMPDIR"' EXIT
cat > "$TMPDIR/try.py" << 'EOF'
import platform
import sys

from freezer.freezing.lowering import compiler_problem
from freezer.hardware import DEVICE_CLASSES

for device_class in DEVICE_CLASSES.values():
    if device_class.kind == "cpu" and device_class.machine == platform.machine():
        problem = compiler_problem(device_class)
        if problem:
            sys.exit(f"{device_class.name}: {problem}")
EOF
for compiler in "$@"; do
    if CXX=$compiler python "$TMPDIR/try.py"; then
        ln --symbolic --force "$(command -v "$compiler")" "${LINK:-/usr/local/bin/g++}"
        echo "g++ is $compiler"
        exit
    fi
done
echo "none of these compilers passes: $*" >&2
exit 1
