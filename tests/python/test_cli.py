"""The real command: one line on stderr for every wrong input, the right exit status, never a traceback."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_checkpoint import TINY

import glm53
from glm53 import _core
from glm53.cli import main
from glm53.console import Progress
from glm53.host import cuda_gpus

RESULT = subprocess.CompletedProcess[str]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RESULT]:
    """Run `glm53 ARGS` with a clean environment."""

    def call(*args: str, env: dict[str, str] | None = None) -> RESULT:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GLM53_")}
        return subprocess.run(
            [sys.executable, "-m", "glm53", *args],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**clean, "HOME": str(tmp_path), **(env or {})},
            stdin=subprocess.DEVNULL,
        )

    return call


def one_line(done: RESULT, status: int, *parts: str) -> None:
    """The command failed with `status` and one line on stderr that has all `parts`."""
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("glm53: error: ")
    for part in parts:
        assert part in lines[0]


def serve_cpu(model: Path) -> list[str]:
    return ["serve", "--device", "cpu", "--port", "0", "--model-dir", str(model)]


def test_version_tells_build_gpu_and_kernels(run: Callable[..., RESULT]) -> None:
    done = run("--version")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"glm53 {glm53.__version__}"
    assert re.fullmatch(r"CUDA objects: (built in \([\w -]+\)|not in this build)", lines[1])
    assert re.match(r"GPU( \d+)?: ", lines[2])
    assert re.match(r"CPU kernels: (scalar|avx2|avx512w?|amx) ", lines[-1])


@pytest.mark.parametrize("command", ["serve", "doctor", "plan", "pull", "service", "prepare", "pin", "verify"])
def test_every_command_has_help(run: Callable[..., RESULT], command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "usage: glm53 " + command in done.stdout
    about = done.stdout.split("\n\n")[1]
    assert about[0].islower(), "a line that says what it does, before the options"
    assert "options:" not in about
    assert "arguments:" not in about


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("pull", ["--download", "--chat-template", "--state-dir"]),
        ("doctor", ["--model-repo", "--download", "--device", "--state-dir", "--mtp", "--run-ahead", "--ct-b"]),
        ("prepare", ["--device", "--download", "--model-repo"]),
        ("pin", ["--device", "--download"]),
        ("verify", ["--device", "--download"]),
    ],
)
def test_commands_offer_no_option_that_does_nothing(
    run: Callable[..., RESULT], command: str, others: list[str]
) -> None:
    text = run(command, "--help", env={"COLUMNS": "80"}).stdout
    assert "--model-dir" in text
    for option in others:
        assert option not in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(("terminal", "redraws"), [("xterm", True), ("dumb", False)])
def test_progress_is_plain_lines_where_a_line_cannot_be_redrawn(
    monkeypatch: pytest.MonkeyPatch, terminal: str, redraws: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", terminal)
    progress = Progress(out)
    progress.update("reading", 0.5)
    progress.close()
    assert progress.redraws == redraws
    assert ("\x1b" in out.getvalue()) == redraws
    assert out.getvalue().endswith("\n")
    assert "reading" in out.getvalue()


def test_a_pipe_gets_a_line_for_each_stage_at_once_and_one_a_tenth_at_most() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for stage in ("reading", "loading"):
        for hundredth in range(60):
            progress.update(stage, hundredth / 100)
    progress.update("loading", 1.0)
    lines = out.getvalue().splitlines()
    assert [lines[0], lines[-1]] == ["reading 0 %", "loading 100 %"]
    assert "loading 0 %" in lines
    assert len(lines) <= 13, "one a tenth of a stage"


def test_help_of_serve_says_what_it_does_and_gives_defaults(run: Callable[..., RESULT]) -> None:
    text = " ".join(run("serve", "--help").stdout.split())
    assert "load the model and answer over HTTP options:" in text
    assert "TCP port (default 30000, GLM53_PORT)" in text
    assert "(default on, GLM53_DOWNLOAD)" in text
    assert "none = open (GLM53_API_KEYS)" in text


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["serve", "--prot", "1"], ["unknown argument --prot", "did you mean --port?"]),
        (["serve", "--model", "x"], ["unknown argument --model;", "did you mean --model-dir?"]),
        (["serve", "--port", "99999"], ["port", "0 to 65535", "command line"]),
        (["serve", "--port"], ["--port", "expected one argument"]),
        (["serve", "-c", "5"], ["ambiguous option: -c could match -cs"]),
        (["serve", "--config", "/nonexistent.toml"], ["/nonexistent.toml", "no such configuration file"]),
        (["frobnicate"], ["invalid choice", "serve"]),
        ([], ["COMMAND", "--help"]),
        (["plan", "--gpu", "24"], ["--ram"]),
        (["plan", "--gpus", "24", "--ram", "64"], ["unknown argument --gpus; did you mean --gpu?"]),
        (["--verison"], ["unknown argument --verison; did you mean --version?"]),
        (["pull", "--mode", "exact"], ["glm53 pull takes no --mode: that setting changes nothing here"]),
        (["prepare", "--device=cpu"], ["glm53 prepare takes no --device: that setting changes nothing here"]),
        (["verify", "--steps", "0"], ["--steps 0: must be at least 1"]),
        (["plan", "--gpu", "0", "--ram", "1"], ["--gpu 0: must be above 0"]),
    ],
)
def test_wrong_command_lines(run: Callable[..., RESULT], args: list[str], parts: list[str]) -> None:
    one_line(run(*args), 78, *parts)


def test_the_demo_looks_at_its_options_before_it_sets_anything_up(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "scripts" / "demo"
    for option in (["--port", "abc"], ["--prot", "1"]):
        done = subprocess.run(
            [str(demo), *option],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "VENV": str(tmp_path / "v")},
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert done.stderr.startswith("error: ")
        assert option[0] in done.stderr
    assert not (tmp_path / "v").exists()


def test_unknown_variable_and_broken_file(run: Callable[..., RESULT], tmp_path: Path) -> None:
    one_line(run("serve", env={"GLM53_PROT": "1"}), 78, "GLM53_PROT", "did you mean GLM53_PORT?")
    broken = tmp_path / "config.toml"
    broken.write_text("port = [")
    one_line(run("serve", "--config", str(broken)), 78, str(broken), "not valid TOML")


@pytest.mark.parametrize(
    "command", [["--version"], ["plan", "--gpu", "24", "--ram", "256"], ["serve", "--print-config"]]
)
def test_results_that_cannot_be_written(tmp_path: Path, command: list[str]) -> None:
    """To a full disk, to nowhere, and to a reader that has gone: never a traceback."""

    def shell(redirection: str) -> RESULT:
        line = f"{sys.executable} -m glm53 {' '.join(command)} {redirection}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GLM53_")}
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=clean)

    one_line(shell("> /dev/full"), 1, "cannot write the result to stdout", "No space left on device")
    for nowhere in (">&-", "> >(exit 0)", "<&- >&- 2>&-"):
        done = shell(nowhere)
        assert (done.returncode, done.stderr) == (0, ""), nowhere


def test_obsolete_variable_is_a_warning(run: Callable[..., RESULT]) -> None:
    done = run("serve", "--print-config", env={"GLM53_CT_SWZ": "1"})
    assert done.returncode == 0
    assert "warning: GLM53_CT_SWZ is ignored" in done.stderr


def test_last_value_wins_and_old_spellings_work(run: Callable[..., RESULT]) -> None:
    done = run(
        *["serve", "--print-config", "-cs", "1024", "-cs", "65536", "--max-batch-size", "2", "-chunk_size", "4096"],
        *["-ambs", "1", "--no-download"],
    )
    assert done.returncode == 0, done.stderr
    for line in ("cache_tokens = 65536", "max_batch_size = 2", "chunk_size = 4096", "autosplit_max_batch_size = 1"):
        assert line in done.stdout
    assert "download = false" in done.stdout


@pytest.mark.skipif(bool(cuda_gpus()[0]), reason="this machine has a GPU")
@pytest.mark.parametrize("args", [["serve"], ["serve", "--device", "cuda"], ["serve", "--demo"]])
def test_b74_without_a_gpu_a_normal_start_fails_loudly(run: Callable[..., RESULT], args: list[str]) -> None:
    one_line(run(*args), 1, "no usable GPU", "glm53 doctor", "--device cpu")


@pytest.mark.skipif(bool(cuda_gpus()[0]), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["prepare", "pin", "verify"])
def test_commands_for_the_gpu_alone_do_not_offer_the_cpu_engine(run: Callable[..., RESULT], command: str) -> None:
    done = run(command)
    one_line(done, 1, "no usable GPU", "glm53 doctor")
    assert "--device cpu" not in done.stderr


def test_demo_and_a_model_folder_are_not_both_served(run: Callable[..., RESULT], tmp_path: Path) -> None:
    done = run("serve", "--demo", "--device", "cpu", "--print-config", "--model-dir", str(tmp_path))
    one_line(done, 78, "--demo", "--model-dir", "leave one of them out")
    one_line(run("serve", "--demo", "-m", str(tmp_path)), 78, "--demo", "--model-dir")
    chosen = run("serve", "--demo", "--print-config", env={"GLM53_MODEL_DIR": str(tmp_path)})
    assert chosen.returncode == 0, "what the environment says is only a default"
    assert "models/nano" in chosen.stdout


def test_wrong_path(run: Callable[..., RESULT], tmp_path: Path) -> None:
    one_line(run(*serve_cpu(tmp_path / "absent")), 78, "absent: no such folder", "--model-dir")


UNREADABLE = """
import os, sys
from pathlib import Path
real = os.stat
def stat(path, *args, **kwargs):
    if "secret" in str(path):
        raise PermissionError(13, "Permission denied", str(path))
    return real(path, *args, **kwargs)
os.stat = stat
"""


def test_a_folder_that_this_user_may_not_look_into(run: Callable[..., RESULT], tmp_path: Path) -> None:
    """As another user's home, or with a service that sees none. Tests may run as root, who may look anywhere."""
    (tmp_path / "sitecustomize.py").write_text(UNREADABLE)
    env, model = {"PYTHONPATH": str(tmp_path)}, tmp_path / "secret" / "model"
    one_line(run(*serve_cpu(model), env=env), 78, str(model), "Permission denied", "--model-dir")
    one_line(run(*serve_cpu(model), "--no-download", env=env), 78, str(model), "Permission denied", "--model-dir")
    done = run("doctor", "--no-measure", "--model-dir", str(model), env=env)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"FAILED  disk: {model} cannot be read (Permission denied)" in done.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no tokenizer.json in this folder; run `glm53 pull`"),
        ("{}", "KeyError: 'added_tokens'"),
        ("{", "JSONDecodeError"),
    ],
)
def test_a_tokenizer_that_is_none(run: Callable[..., RESULT], copy: Path, content: str | None, says: str) -> None:
    (copy / "tokenizer.json").unlink()
    if content is not None:
        (copy / "tokenizer.json").write_text(content)
    one_line(run(*serve_cpu(copy)), 78, str(copy), says, "glm53 pull" if content is None else "download the file again")


def test_empty_folder_that_may_not_be_filled(run: Callable[..., RESULT], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    one_line(run(*serve_cpu(empty), "--no-download"), 78, "empty: the folder is empty", "glm53 pull")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--mtp", "2"], ["mtp: the CPU engine does not draft"]),
        (["--chat-template", "/nonexistent.jinja"], ["chat_template: /nonexistent.jinja does not exist"]),
        (["--ct-cpus", "8191"], ["ct_cpus: CPU 8191 is none that this process may use", "leave ct_cpus out"]),
        (["--ct-cpus", "0", "--ct-threads", "2"], ["ct_threads = 2, but ct_cpus names 1 CPUs"]),
    ],
)
def test_what_cannot_work_is_told_before_a_checkpoint_is_downloaded(
    run: Callable[..., RESULT], tmp_path: Path, wrong: list[str], says: list[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    one_line(run(*serve_cpu(empty), *wrong, env={"HF_ENDPOINT": "http://127.0.0.1:9"}), 78, *says)


def test_kernels_that_this_processor_lacks_are_told_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_core, "cpu_features", lambda: {"isa": "avx2", "isas": ["avx2", "scalar"]})
    for command in (["doctor", "--no-measure"], ["serve", "--demo", "--device", "cpu", "--port", "0"]):
        assert main([*command, "--isa", "amx"]) == 78
        assert "isa = amx: this processor runs avx2, scalar; name one of these" in capsys.readouterr().err


def test_gguf_file_and_folder(run: Callable[..., RESULT], tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    one_line(run(*serve_cpu(folder)), 78, "a GGUF model", "EXL3")
    one_line(run(*serve_cpu(folder / "model.gguf")), 78, "a GGUF file", "EXL3")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint to damage."""
    target = tmp_path / "model"
    shutil.copytree(TINY, target)
    return target


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_plain_hugging_face_folder(run: Callable[..., RESULT], copy: Path) -> None:
    edit_config(copy, quantization_config=None)
    one_line(run(*serve_cpu(copy)), 78, "not an EXL3 checkpoint", "glm53 pull")


def test_another_architecture(run: Callable[..., RESULT], copy: Path) -> None:
    edit_config(copy, model_type="llama")
    one_line(run(*serve_cpu(copy)), 78, "'llama'", "glm5_next")


def test_corrupt_json(run: Callable[..., RESULT], copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": ')
    one_line(run(*serve_cpu(copy)), 78, "config.json: not valid JSON", "download the file again")


def test_weights_missing_or_truncated(run: Callable[..., RESULT], copy: Path) -> None:
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    one_line(run(*serve_cpu(copy)), 78, "no *.safetensors")
    weights.write_bytes(data[: len(data) // 2])
    done = run(*serve_cpu(copy))
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert "model.safetensors" in done.stderr.splitlines()[-1]


def test_port_in_use(run: Callable[..., RESULT]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = run("serve", "--demo", "--device", "cpu", "--port", str(port))
    one_line(done, 1, f"port {port} on 127.0.0.1 is in use", "--port")


def test_address_of_another_machine(run: Callable[..., RESULT]) -> None:
    done = run("serve", "--demo", "--device", "cpu", "--host", "192.0.2.1", "--port", "0")
    one_line(done, 1, "192.0.2.1", "--host")
    for name in ("a..b", "a" * 80):
        done = run("serve", "--demo", "--device", "cpu", "--host", name, "--port", "0")
        one_line(done, 78, f"host {name!r}", "empty or too long", "--host")


def test_script_that_is_none(run: Callable[..., RESULT], tmp_path: Path) -> None:
    script = tmp_path / "s.jsonl"
    script.write_text("{}\n")
    one_line(run("serve", "--scripted", str(script), "--port", "0"), 78, str(script), "line 1")


def test_not_enough_ram(run: Callable[..., RESULT], tmp_path: Path) -> None:
    """The real command in a process that believes it may take 1 MB."""
    patch = tmp_path / "sitecustomize.py"
    patch.write_text("import glm53.checkpoint.memory as memory\nmemory.available_ram = lambda *a: 10**6\n")
    done = run(*serve_cpu(TINY), env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"GiB of RAM, 0.0 GiB are available: free memory", done.stderr.splitlines()[-1])
