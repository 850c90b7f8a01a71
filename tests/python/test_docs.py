"""README and HACKING say only what is there: files that exist, options that the command has, links that resolve."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = (
    "core",
    "python",
    "server",
    "systemd",
    "packaging",
    "tests",
    "bench",
    "scripts",
    "docs",
    "cmake",
    "tools",
    "data",
)
OWN_OPTIONS = {"--system", "--once", "--python", "--core", "--cuda", "--try", "--out", "--preset", "--now"}
"""Options of the scripts and of systemctl, not of glm53."""


def help_text(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "glm53", *command, "--help"], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option of every command, as --help shows it."""
    text = help_text() + "".join(help_text(c) for c in ("serve", "doctor", "plan", "pull", "prepare", "pin"))
    text += help_text("service", "install")
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "results.md"], ids=lambda p: p.name)
def test_options_in_documents_exist(document: Path, options: set[str]) -> None:
    text = document.read_text()
    lines = [line for line in text.splitlines() if "glm53" in line or line.startswith(("| `-", "* "))]
    used = set(re.findall(r"(?<![\w-])--[a-z][\w-]+|(?<=`)-[a-z_]+(?= )", "\n".join(lines)))
    assert used - options - OWN_OPTIONS == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_paths_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    pattern = rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*-]+"
    for path in set(re.findall(pattern, text)):
        wanted = path.rstrip(".,:;)")
        assert list(ROOT.glob(wanted)), f"{document.name} names {wanted}, which is not there"
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_readme_opens_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text().split("## ")[0]
    assert "scripts/demo" in head
    assert "scripts/test" in head
    assert (ROOT / "scripts/demo").stat().st_mode & 0o111
    assert (ROOT / "scripts/test").stat().st_mode & 0o111


def test_readme_has_the_warnings_a_user_must_meet() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "Fast decode is not bit-exact" in text
    assert "panel proves the prefill path only" in text
    assert "One mode at a time on a port" in text


def test_files_in_the_tables_of_hacking_exist() -> None:
    """A row is `| folder: name, name | ... |`; a name without an ending stands for a header and its source."""
    names = {p.name for folder in ("core", "python", "server") for p in (ROOT / folder).rglob("*")}
    stems = {Path(n).stem for n in names if n.endswith((".h", ".cpp", ".cu"))}
    rows = re.findall(r"^\| ((?:[\w/]+: )?[\w`., ]+) \| [^|]+ \|$", (ROOT / "HACKING.md").read_text(), re.MULTILINE)
    listed = [name.strip(" `") for row in rows for name in row.split(": ")[-1].split(",")]
    assert len(listed) > 100
    known = names | stems | {"file", "command"}  # the last two are headings
    assert [name for name in listed if name not in known and not (ROOT / name).exists()] == []


def test_every_source_file_has_an_entry_in_hacking() -> None:
    """In the row of its own folder: several folders have an errors.py, an engine.py, a sampling.py."""
    text = (ROOT / "HACKING.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    core, package, server = ROOT / "core", ROOT / "python" / "glm53", ROOT / "server"
    for path in (p for p in core.rglob("*") if p.is_file()):
        ours = [r for r in rows if r.startswith(f"core/{path.parent.name}: ")]
        assert any({path.stem, path.name} & set(re.split(r"[:, ]+", r)) for r in ours), path
    for base in (package, server):
        for path in (p for p in base.rglob("*.py") if p.name != "__init__.py"):
            folder = str(path.parent.relative_to(base))
            ours = [r for r in rows if (r.startswith(f"{folder}: ") if folder != "." else ": " not in r)]
            assert any(path.name in re.split(r"[:, `]+", r) for r in ours), path
    for path in (ROOT / "bench").glob("*.py"):
        assert any(f"bench/{path.name}" in r for r in rows), path


def test_repository_holds_no_build_host_path() -> None:
    """Documents, scripts, units and results work from any clone."""
    folders = ("scripts", "systemd", "bench/results", "bench/panels")
    files = [path for folder in folders for path in (ROOT / folder).iterdir() if path.suffix != ".npz"]
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md", *files]:
        assert not re.search(r"/work/|/root/|/tmp/", path.read_text()), path
