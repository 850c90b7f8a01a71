#!/usr/bin/env bash
# Makes a Debian package of a wheel and everything it needs, for the Debian whose python3 is of the wheel's version.
#   packaging/build_deb.sh [--python PYTHON] [--wheel WHEEL] [--extra cpu|cuda] [--torch REQUIREMENT] [--out DIR]
#   --python  an interpreter of that version ($PYTHON, else python3)    --wheel  default: packaging/build.sh makes one
#   --extra   cuda (default; several GB) or cpu, for trying             --torch  e.g. torch==2.13.0+cpu
# See packaging/README.md for the layout. Needs dpkg-deb; no root.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} wheel='' extra=cuda torch='torch>=2.11' out=dist
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=${2:?--python needs a program}; shift ;;
    --wheel) wheel=${2:?--wheel needs a file}; shift ;;
    --extra) extra=${2:?--extra needs cpu or cuda}; shift ;;
    --torch) torch=${2:?--torch needs a requirement}; shift ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown argument $1 (see $0 --help)" >&2; exit 2 ;;
  esac
  shift
done
case $extra in cpu | cuda) ;; *) echo "error: --extra must be cpu or cuda" >&2; exit 2 ;; esac
command -v dpkg-deb >/dev/null || { echo "error: dpkg-deb is needed (Debian: apt install dpkg)" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "$wheel" ]; then
  cuda=on; if [ "$extra" = cpu ]; then cuda=off; fi
  packaging/build.sh --python "$python" --cuda "$cuda" --out "$work/wheel" >&2
  wheel=$(echo "$work"/wheel/*.whl)
fi
minor=$("$python" -c 'import sys; print("3.%d" % sys.version_info[1])')
version=$(basename "$wheel" | cut -d- -f2)
glibc=$(basename "$wheel" | sed -nE 's/.*manylinux_([0-9]+)_([0-9]+)_.*/\1.\2/p')  # what auditwheel found
venv=$work/root/opt/glm53 site=$work/root/opt/glm53/lib/python$minor/site-packages

echo "==> environment for /opt/glm53" >&2
mkdir -p "$work/root/DEBIAN"
"$python" -m venv --without-pip "$venv"
"$python" -m pip --python "$venv/bin/python" install -q --no-compile "$torch" "$wheel[$extra]"
# Made here, meant for /opt/glm53 and Debian's interpreter: links, configuration and first lines name those.
for name in python python3 "python$minor"; do ln -sf "/usr/bin/python$minor" "$venv/bin/$name"; done
printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\n' "$minor" >"$venv/pyvenv.cfg"
rm -f "$venv"/bin/[aA]ctivate*
grep -rlIF "$work/root" "$venv/bin" | xargs -r sed -i "s#$work/root##g"
find "$site" -name direct_url.json -path '*glm53-*' -delete
sed -i '/direct_url.json/d' "$site/glm53-$version.dist-info/RECORD"
# Byte code is part of the package and never rewritten, so that running it as root leaves no file dpkg does not know.
# Its status says nothing: torch carries a test file for newer Pythons. check_deb.py asserts ours.
"$python" -m compileall -q -j 0 --invalidation-mode unchecked-hash -s "$work/root" "$venv/lib" >/dev/null || true

# The unit, the module to load at boot and the settings, from the wheel itself.
shipped=$site/glm53/systemd
install -Dm 644 "$shipped/glm53.service" "$work/root/usr/lib/systemd/system/glm53.service"
sed -i 's#^ExecStart=glm53 #ExecStart=/opt/glm53/bin/glm53 #' "$work/root/usr/lib/systemd/system/glm53.service"
install -Dm 644 "$shipped/modules-load.conf" "$work/root/usr/lib/modules-load.d/glm53.conf"
install -Dm 644 "$shipped/config.toml" "$work/root/etc/glm53/config.toml"
install -Dm 644 LICENSE "$work/root/usr/share/doc/glm53/copyright"
install -d "$work/root/usr/bin"
ln -s ../../opt/glm53/bin/glm53 "$work/root/usr/bin/glm53"
# pip put the unit into the environment as well, where nobody reads it.
rm -rf "$venv/lib/systemd" "$venv/lib/modules-load.d"
sed -i '\#\.\./lib/systemd/\|\.\./lib/modules-load\.d/#d; \#lib/systemd/system/glm53.service\|lib/modules-load.d/#d' \
  "$site/glm53-$version.dist-info/RECORD"

echo /etc/glm53/config.toml >"$work/root/DEBIAN/conffiles"
for script in postinst prerm postrm; do install -m 755 "packaging/debian/$script" "$work/root/DEBIAN/$script"; done
cat >"$work/root/DEBIAN/control" <<EOF
Package: glm53
Version: $version+py${minor/./}
Architecture: amd64
Maintainer: glm53 maintainers <glm53@localhost>
Installed-Size: $(du -sk --exclude=DEBIAN "$work/root" | cut -f1)
Depends: python$minor, libc6 (>= $glibc), libgcc-s1, libstdc++6
Recommends: systemd
Section: net
Priority: optional
Description: GLM-5.3-Flash from one 24 GB GPU and host RAM
 A server with an OpenAI-compatible API, as a systemd service. Everything that
 Debian does not have in the versions needed lies in /opt/glm53.
EOF
find "$work/root" -type d -exec chmod 755 {} +
(cd "$work/root" && find opt usr -type f -print0 | sort -z | xargs -0 md5sum) >"$work/md5sums"
mv "$work/md5sums" "$work/root/DEBIAN/md5sums"
mkdir -p "$out"
deb=$out/glm53_$version+py${minor/./}_amd64.deb
echo "==> dpkg-deb" >&2
dpkg-deb --root-owner-group -Zzstd -z3 --build "$work/root" "$deb" >/dev/null
"$python" packaging/check_deb.py "$deb"
echo "$deb"
