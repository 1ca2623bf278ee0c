#!/bin/sh
# Name what the machine lacks, with the command that installs it. Nothing is installed from here.
missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need gcc gcc
need git git
need ld binutils
need flock util-linux
need python3 python3
python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
py_include=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])' 2>/dev/null)
[ -f "$py_include/Python.h" ] || missing="$missing python3-dev"
printf '#include <stdio.h>\n' | gcc -E - >/dev/null 2>&1 || missing="$missing libc6-dev"
if [ -n "$missing" ]; then
	echo "valve: this machine lacks:$missing" >&2
	echo "valve: on Debian or Ubuntu:  sudo apt-get install -y$missing" >&2
	exit 1
fi
