"""Asserts what is inside the Debian package, as dpkg-deb tells it (standard library and dpkg-deb only)."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

NEEDED = (
    "/etc/glm53/config.toml",
    "/usr/bin/glm53",
    "/usr/lib/systemd/system/glm53.service",
    "/usr/lib/modules-load.d/glm53.conf",
    "/usr/share/doc/glm53/copyright",
    "/opt/glm53/bin/glm53",
    "/opt/glm53/pyvenv.cfg",
)
PLACES = ("/etc/glm53/", "/opt/glm53/", "/usr/bin/glm53", "/usr/lib/systemd", "/usr/lib/modules-load", "/usr/share/")
SCRIPTS = ("postinst", "prerm", "postrm", "conffiles", "control", "md5sums")
TEXTS = {
    "/opt/glm53/bin/glm53": r"^#!/opt/glm53/bin/python",
    "/opt/glm53/pyvenv.cfg": r"^home = /usr/bin$",
    "/usr/lib/systemd/system/glm53.service": r"^ExecStart=/opt/glm53/bin/glm53 serve$",
}


def dpkg_deb(*arguments: str) -> str:
    return subprocess.run(["dpkg-deb", *arguments], capture_output=True, text=True, check=True).stdout


def listing(deb: Path) -> dict[str, str]:
    """Path in the package -> its line in `dpkg-deb --contents` (mode, owner, size, date, path, link target)."""
    found = {}
    for line in dpkg_deb("--contents", str(deb)).splitlines():
        path = line.split(None, 5)[5].split(" -> ")[0].removeprefix(".").rstrip("/")
        found[path] = line
    return found


def wrong_files(files: dict[str, str]) -> list[str]:
    """Missing files, files in places a package may not use, modes and owners that are not plain."""
    found = [f"missing: {name}" for name in NEEDED if name not in files]
    native = [n for n in files if re.search(r"/site-packages/glm53/_core\..*\.so$", n)]
    found += [] if len(native) == 1 else [f"native modules: {native or 'none'}"]
    for path, line in files.items():
        mode, owner = line.split()[:2]
        if mode[0] == "d":
            continue
        if not path.startswith(PLACES):
            found.append(f"not wanted: {path}")
        if owner != "root/root" or "s" in mode[1:] or (mode[0] == "-" and mode[8] == "w"):
            found.append(f"mode or owner: {mode} {owner} {path}")
        if path.endswith(".py") and "/site-packages/glm53/" in path:
            folder, name = path.rsplit("/", 1)
            if not any(f.startswith(f"{folder}/__pycache__/{name[:-3]}.cpython-") for f in files):
                found.append(f"no byte code: {path}")
    return found


def wrong_texts(deb: Path) -> list[str]:
    """The few files whose text names the place they are meant for."""
    found = []
    for path, pattern in TEXTS.items():
        tar = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE)
        text = subprocess.run(["tar", "-xO", f".{path}"], stdin=tar.stdout, capture_output=True, text=True, check=False)
        tar.communicate()
        if not re.search(pattern, text.stdout, re.MULTILINE):
            found.append(f"{path}: nothing in it matches {pattern}")
    return found


def wrong_control(deb: Path) -> list[str]:
    """Maintainer scripts, fields and the list of configuration files."""
    there = dpkg_deb("--info", str(deb))
    found = [f"control: no {name}" for name in SCRIPTS if not re.search(rf"\s{name}\b", there)]
    for field, pattern in (("Depends", r"python3\.\d+, "), ("Architecture", "amd64"), ("Version", r"\d[\w.+]*")):
        value = dpkg_deb("--field", str(deb), field).strip()
        found += [] if re.match(pattern, value) else [f"control: {field} is {value!r}"]
    listed = dpkg_deb("--info", str(deb), "conffiles").split()
    return found + ([] if listed == ["/etc/glm53/config.toml"] else [f"conffiles: {listed}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deb", type=Path)
    args = parser.parse_args()
    found = wrong_files(listing(args.deb)) + wrong_control(args.deb) + wrong_texts(args.deb)
    for problem in found[:20]:
        sys.stderr.write(f"error: {args.deb.name}: {problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
