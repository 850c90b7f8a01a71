"""Every setting, in one frozen object merged once: defaults, TOML file, environment, command line (later wins).

A setting is a field of `Settings`: its name is the TOML key, GLM53_ + its name in capitals the environment variable,
and `flags` its command-line spellings. The example file, `--help`, `--print-config` and the documentation test are all
made from these fields, so there is no second list to keep in step. Nothing else in the package reads GLM53_* variables.
"""
# `_setting` returns a dataclass field, which the linter cannot see.
# ruff: noqa: RUF009

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError

SYSTEM_CONFIG = Path("/etc/glm53/config.toml")
ENV_PREFIX = "GLM53_"
CONFIG_VARIABLE = "GLM53_CONFIG"

OBSOLETE: Mapping[str, str] = {
    "GLM53_CT_SWZ": "the CPU tier reads the one pinned copy of the experts in place; there is no second copy to enable",
    "GLM53_ROOT": "the wheel knows where it is installed; nothing replaces it",
}
"""Variables of the container image this system replaces which mean nothing here: accepted, with a warning."""

Parse = Callable[[object], Any]


def _integer(low: int, high: int = 2**31 - 1) -> Parse:
    def parse(raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError("a whole number is needed")
        try:
            value = int(raw)
        except ValueError:
            raise ValueError("a whole number is needed") from None
        if not low <= value <= high:
            raise ValueError(f"must be {low} to {high}" if high < 2**31 - 1 else f"must be at least {low}")
        return value

    return parse


def _number(low: float, *, above: bool = False) -> Parse:
    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError("a number is needed")
        try:
            value = float(raw)
        except ValueError:
            raise ValueError("a number is needed") from None
        if not (value > low if above else value >= low) or value == float("inf"):
            raise ValueError(f"must be {'above' if above else 'at least'} {low:g}")
        return value

    return parse


def _choice(*allowed: str) -> Parse:
    def parse(raw: object) -> str:
        if raw not in allowed:
            raise ValueError(f"must be {' or '.join(allowed)}")
        return str(raw)

    return parse


def _truth(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be true or false")


def _text(raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError("a non-empty string is needed")
    return raw


def _path(raw: object) -> Path:
    return raw if isinstance(raw, Path) else Path(_text(raw)).expanduser()


def _words(raw: object) -> tuple[str, ...]:
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
        raise ValueError("a list of strings is needed")
    return tuple(i.strip() for i in items if i.strip())


def _auto(inner: Parse) -> Parse:
    """`auto` (or nothing) leaves the value None: measured or derived when it is needed."""
    return lambda raw: None if raw is None or raw in {"auto", ""} else inner(raw)


def _cpu_list(raw: object) -> tuple[int, ...]:
    """ "2-5,8" as (2, 3, 4, 5, 8); the kernel's own notation, see cpuset(7)."""
    cpus: list[int] = []
    for part in _text(raw).split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError("must be auto or a CPU list like 2-23 or 2-5,8")
        cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(dict.fromkeys(cpus))


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known about one setting besides its value."""

    name: str
    default: Any
    parse: Parse
    group: str
    unit: str
    help: str
    flags: tuple[str, ...]
    switch: bool
    secret: bool

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


def _setting(
    default: Any,
    parse: Parse,
    group: str,
    help: str,
    *,
    unit: str = "",
    flags: tuple[str, ...] = (),
    switch: bool = False,
    secret: bool = False,
) -> Any:
    meta = {"parse": parse, "group": group, "help": help, "unit": unit, "flags": flags, "switch": switch}
    make: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(**make, metadata={**meta, "secret": secret})


def default_model_dir() -> Path:
    """systemd's state directory when the service runs, the user's data directory otherwise."""
    state = os.environ.get("STATE_DIRECTORY")
    if state:
        return Path(state.split(":")[0]) / "model"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "glm53" / "model"


def default_state_dir() -> Path:
    """Where learned routing statistics are kept between runs."""
    state = os.environ.get("STATE_DIRECTORY")
    if state:
        return Path(state.split(":")[0])
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "glm53"


@dataclass(frozen=True)
class Settings:
    """Resolved settings. `None` in a field whose default is `auto` means: measure or derive it at load."""

    # model
    model_dir: Path = _setting(
        default_model_dir, _path, "model", "folder of the EXL3 checkpoint", flags=("--model-dir", "-m")
    )
    model_repo: str = _setting(
        "turboderp/GLM-5.3-Flash-exl3", _text, "model", "Hugging Face repository to download", flags=("--model-repo",)
    )
    model_revision: str = _setting(
        "3.05bpw", _text, "model", "branch, tag or commit of the repository", flags=("--model-revision",)
    )
    download: bool = _setting(
        True, _truth, "model", "download the checkpoint when config.json is missing", flags=("--download",), switch=True
    )
    chat_template: str = _setting(
        "builtin",
        _text,
        "model",
        "builtin, checkpoint (its own jinja file), or a jinja file",
        flags=("--chat-template",),
    )
    state_dir: Path = _setting(
        default_state_dir, _path, "model", "folder for what is learned between runs", flags=("--state-dir",)
    )

    # engine
    mode: Literal["fast", "exact"] = _setting(
        "fast",
        _choice("fast", "exact"),
        "engine",
        "fast (CPU tier) or exact (equal to stock exllamav3)",
        flags=("--mode",),
    )
    device: Literal["auto", "cuda", "cpu"] = _setting(
        "auto",
        _choice("auto", "cuda", "cpu"),
        "engine",
        "auto and cuda need an NVIDIA GPU; cpu is for trying and testing",
        flags=("--device",),
    )
    gpu: int = _setting(0, _integer(0, 63), "engine", "index of the GPU", flags=("--gpu", "-gpu"))
    cache_tokens: int = _setting(
        131072,
        _integer(256),
        "engine",
        "size of the KV cache; a smaller one leaves room for more expert slots",
        unit="tokens",
        flags=("--cache-tokens", "-cs", "--cache-size", "--cache_size"),
    )
    max_batch_size: int = _setting(
        8, _integer(1, 64), "engine", "streams admitted together", flags=("--max-batch-size", "--max_batch_size")
    )
    chunk_size: int = _setting(
        8192,
        _integer(256),
        "engine",
        "most prompt tokens in one prefill pass",
        unit="tokens",
        flags=("--chunk-size", "-chunk_size", "--chunk_size"),
    )
    autosplit_max_batch_size: int = _setting(
        4,
        _integer(1, 8),
        "engine",
        "streams that decode together in one step",
        flags=("--autosplit-max-batch-size", "-ambs", "--autosplit_max_batch_size"),
    )

    # server
    host: str = _setting("127.0.0.1", _text, "server", "address to listen on; 0.0.0.0 for all", flags=("--host",))
    port: int = _setting(30000, _integer(0, 65535), "server", "TCP port", flags=("--port", "-p"))
    served_name: str = _setting(
        "glm-5.3-flash", _text, "server", "model name in the API", flags=("--served-name", "--served-model-name")
    )
    api_keys: tuple[str, ...] = _setting(
        (), _words, "server", "keys accepted as bearer tokens; none = open", flags=("--api-key",), secret=True
    )
    api_key_file: Path | None = _setting(
        None, _auto(_path), "server", "file with one API key a line", flags=("--api-key-file",)
    )
    max_queue: int = _setting(
        64, _integer(0), "server", "requests that may wait before 503", unit="requests", flags=("--max-queue",)
    )
    drain_s: float = _setting(
        30.0, _number(0), "server", "time running streams get to finish on stop", unit="s", flags=("--drain",)
    )

    max_n: int = _setting(8, _integer(1, 64), "server", "most answers one request may ask for", flags=("--max-n",))
    max_body_mib: float = _setting(
        32.0, _number(0, above=True), "server", "largest request body", unit="MiB", flags=("--max-body-mib",)
    )
    body_timeout_s: float = _setting(
        60.0, _number(0), "server", "time a client has to send its request", unit="s", flags=("--body-timeout",)
    )
    request_timeout_s: float = _setting(
        3600.0, _number(0), "server", "longest life of a request; 0 = no limit", unit="s", flags=("--request-timeout",)
    )
    write_timeout_s: float = _setting(
        60.0,
        _number(0),
        "server",
        "time a client may read nothing before it is dropped",
        unit="s",
        flags=("--write-timeout",),
    )
    ping_s: float = _setting(
        10.0, _number(0, above=True), "server", "longest silence in a stream", unit="s", flags=("--ping",)
    )
    cors_origins: tuple[str, ...] = _setting(
        ("*",), _words, "server", "web origins that may call the API; * = any", flags=("--cors-origins",)
    )
    log_requests: bool = _setting(
        True, _truth, "server", "one log line a request", flags=("--log-requests",), switch=True
    )

    # CPU tier
    ct_cpus: tuple[int, ...] | None = _setting(
        None,
        _auto(_cpu_list),
        "cpu tier",
        "CPUs of the worker threads, like 2-23; auto = one a physical core, first two cores left free",
        flags=("--ct-cpus",),
    )
    ct_threads: int | None = _setting(
        None,
        _auto(_integer(1, 1024)),
        "cpu tier",
        "worker threads; auto = one a CPU of ct_cpus",
        flags=("--ct-threads",),
    )
    ct_b: float | None = _setting(
        None,
        _auto(_number(0, above=True)),
        "cpu tier",
        "cost of one expert on the CPU; auto = measured at load",
        unit="ms",
        flags=("--ct-b",),
    )
    isa: Literal["scalar", "avx2", "avx512"] | None = _setting(
        None,
        _auto(_choice("scalar", "avx2", "avx512")),
        "cpu tier",
        "instruction set of the CPU kernels; auto = best this CPU has",
        flags=("--isa",),
    )

    # expert cache
    ec_reserve_gb: float | None = _setting(
        None,
        _auto(_number(0)),
        "expert cache",
        "VRAM left free; auto = 1.5 in fast, 1.0 in exact",
        unit="GB",
        flags=("--ec-reserve-gb",),
    )
    ec_elastic_gb: float = _setting(
        10.0, _number(0), "expert cache", "slots that long prefills may borrow", unit="GB", flags=("--ec-elastic-gb",)
    )
    ec_stage_gb: float = _setting(
        2.6, _number(0), "expert cache", "size of each of the two staging buffers", unit="GB", flags=("--ec-stage-gb",)
    )
    triton_pin: Path | None = _setting(
        None,
        _auto(_path),
        "expert cache",
        "file with the KDA kernels' autotune picks; auto = the one shipped for this GPU architecture",
        flags=("--triton-pin",),
    )

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def reserve_gb(self) -> float:
        """VRAM kept free after the expert cache is sized, in GB (10^9 bytes)."""
        if self.ec_reserve_gb is not None:
            return self.ec_reserve_gb
        return 1.5 if self.mode == "fast" else 1.0

    def all_api_keys(self) -> tuple[str, ...]:
        """`api_keys` and the lines of `api_key_file`. Raises ConfigError if the file cannot be read."""
        if self.api_key_file is None:
            return self.api_keys
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except OSError as e:
            raise ConfigError(f"api_key_file: cannot read {self.api_key_file} ({e.strerror})") from None
        return (*self.api_keys, *(line.strip() for line in lines if line.strip() and not line.startswith("#")))


def specs() -> tuple[Spec, ...]:
    """All settings in the order they are declared."""
    out = []
    for f in fields(Settings):
        if f.metadata:
            default = f.default_factory if callable(f.default_factory) else f.default
            out.append(Spec(f.name, default, **f.metadata))
    return tuple(out)


_SPECS = {s.name: s for s in specs()}


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""


def _parsed(spec: Spec, raw: object, source: str) -> Any:
    try:
        return spec.parse(raw)
    except ValueError as e:
        shown = "the value given" if spec.secret else repr(raw)
        raise ConfigError(f"{source}: {spec.name} = {shown}: {e}") from None


def _read_toml(path: Path, must_exist: bool) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{path}: no such configuration file") from None
        return {}
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot read the configuration file ({e})") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None


def _from_file(path: Path, must_exist: bool) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    for key, value in _read_toml(path, must_exist).items():
        if key not in _SPECS:
            raise ConfigError(f"{path}: unknown setting {key!r}{nearest(key, _SPECS)}")
        found[key] = (value, str(path))
    return found


def _from_environment(env: Mapping[str, str], warnings: list[str]) -> dict[str, tuple[object, str]]:
    by_variable = {s.env: s.name for s in _SPECS.values()}
    found: dict[str, tuple[object, str]] = {}
    for variable in sorted(v for v in env if v.startswith(ENV_PREFIX)):
        if variable in OBSOLETE:
            warnings.append(f"{variable} is ignored: {OBSOLETE[variable]}")
        elif variable in by_variable:
            found[by_variable[variable]] = (env[variable], variable)
        elif variable != CONFIG_VARIABLE:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable, by_variable)}")
    return found


def load_settings(
    overrides: Mapping[str, object] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    """Merge defaults, file, environment and `overrides` (the command line: name -> raw value) into Settings.

    The file is `config`, else $GLM53_CONFIG, else /etc/glm53/config.toml where that exists. Raises ConfigError that
    names the setting, where it came from, and for an unknown name the nearest known one.
    """
    env = os.environ if env is None else env
    warnings: list[str] = []
    named = config or (Path(env[CONFIG_VARIABLE]) if env.get(CONFIG_VARIABLE) else None)
    raw = _from_file(named or SYSTEM_CONFIG, must_exist=named is not None)
    raw |= _from_environment(env, warnings)
    for name, value in (overrides or {}).items():
        if name not in _SPECS:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, _SPECS)}")
        raw[name] = (value, "command line")
    values = {name: _parsed(_SPECS[name], value, source) for name, (value, source) in raw.items()}
    sources = {name: raw[name][1] if name in raw else "default" for name in _SPECS}
    return Settings(**values, sources=sources, warnings=tuple(warnings))


def _toml_value(value: object) -> str:
    if value is None:
        return '"auto"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        if value and all(isinstance(v, int) for v in value):
            return '"' + ",".join(str(v) for v in value) + '"'
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def print_config(settings: Settings) -> str:
    """The resolved values as TOML, each with where it came from. Secrets are counted, never shown."""
    lines = []
    for spec in _SPECS.values():
        value = getattr(settings, spec.name)
        shown = f'"<{len(value)} hidden>"' if spec.secret and value else _toml_value(value)
        unit = f"{spec.unit}, " if spec.unit else ""
        lines.append(f"{spec.name} = {shown}  # {unit}{settings.sources.get(spec.name, 'default')}")
    return "\n".join(lines) + "\n"


def example_config() -> str:
    """The text of the example config.toml: every setting, its default, unit and meaning, commented out."""
    lines = [
        "# Settings of glm53. Every line is a default; remove the # to change one.",
        "# The environment (GLM53_ + name in capitals) wins over this file, the command line over both.",
        "# `glm53 serve --print-config` shows the values in force and where each came from.",
    ]
    group = ""
    for spec in _SPECS.values():
        if spec.group != group:
            group = spec.group
            lines += ["", f"## {group}"]
        shown = {"model_dir": "/var/lib/glm53/model", "state_dir": "/var/lib/glm53"}.get(spec.name)
        default = shown or (spec.default() if callable(spec.default) else spec.default)
        unit = f" [{spec.unit}]" if spec.unit else ""
        lines += ["", f"# {spec.help}{unit}", f"#{spec.name} = {_toml_value(default)}"]
    return "\n".join(lines) + "\n"
