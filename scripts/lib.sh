# Shared by the scripts beside it: finds Python, makes .venv, installs what is missing, builds the native module.
# Everything is re-run cheaply: a step whose inputs have not changed is skipped. Set VENV to use another environment.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-$PWD/.venv}
JOBS=${JOBS:-$(nproc)}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# A stray setting of the caller would change what the scripts run.
for variable in ${!GLM53_*}; do unset "$variable"; done

# A proxy of the caller's is for the package index, not for the servers that the scripts start on this machine.
no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
export no_proxy NO_PROXY=$no_proxy

step() { printf '\n==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local p
  for p in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$p"; return; fi
  done
  die "Python 3.11 or newer is needed: install it, or name it with PYTHON=/path/to/python3"
}

# apt_install PROBE_COMMAND PACKAGE...: install Debian packages when the probe fails and we are root.
apt_install() {
  local probe=$1; shift
  if bash -c "$probe" >/dev/null 2>&1; then return; fi
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || die "missing: $*; install it (Debian: sudo apt-get install $*)"
  step "apt-get install $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq "$@" >/dev/null 2>&1 || { apt-get update -qq; apt-get install -y -qq "$@" >/dev/null; }
}

# apt_optional PROBE_COMMAND PACKAGE: in CI, install what some tests use; elsewhere those tests skip and say so.
apt_optional() {
  [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] || return 0
  (apt_install "$@") || true
}

make_venv() {
  if [ ! -x "$VENV/bin/python" ]; then
    local python; python=$(find_python)
    step "creating $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" || die "cannot create $VENV (Debian: sudo apt-get install python3-venv)"
    "$VENV/bin/python" -m pip install -qq 'pip>=24'
  fi
  export PATH="$VENV/bin:$PATH"
}

# The CPU build of torch, in the version the tests were written against. A plain `pip install torch` would fetch
# gigabytes of CUDA libraries, so the CPU build is asked for by name first, of the index in use and of torch's own (PyPI
# has none); a torch that is already there is kept.
install_torch() {
  python -c 'import torch' 2>/dev/null && return
  step "installing torch (CPU build, a few hundred MB)"
  pip install -qq 'torch==2.13.0+cpu' 2>/dev/null ||
    pip install -qq 'torch==2.13.0' --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    pip install -qq 'torch==2.13.0' || pip install -qq 'torch>=2.11,<3'
}

# stamp NAME INPUT... : true when the inputs (files or folders) are as they were at the last `stamp_done NAME`.
stamp_hash() {
  find "$@" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-64
}
stamp() { local name=$1; shift; [ "$(cat "$VENV/.stamp-$name" 2>/dev/null)" = "$(stamp_hash "$@")" ]; }
stamp_done() { local name=$1; shift; stamp_hash "$@" >"$VENV/.stamp-$name"; }

# install_package: dependencies and the editable package with a CPU-only native module.
install_package() {
  local native=(core python/bindings cmake CMakeLists.txt pyproject.toml)
  if stamp package "${native[@]}" && python -c 'import glm53._core' 2>/dev/null; then return; fi
  apt_install 'command -v c++' g++
  install_torch
  step "building the native module and installing glm53 into $VENV (minutes)"
  pip install -qq 'scikit-build-core>=1.0,<2' 'nanobind>=2.9,<4' 'cmake>=3.25' 'ninja>=1.11'
  pip install -qq --no-build-isolation -e '.[cpu,test,lint]' -C build-dir=build/py-cpu -C cmake.define.GLM53_CUDA=OFF
  stamp_done package "${native[@]}"
}

setup() {
  make_venv
  install_package
}
