"""Every setting, in one frozen object merged once: defaults, TOML file, environment, command line (later wins).

A setting is a field of `Settings`: its name is the TOML key, GLM53_ + its name in capitals the environment variable,
-- + its name with dashes the option, unless `flags` names others. The example file, `--help`, `--print-config` and the
documentation test are all made from these fields, so there is no second list to keep in step. Nothing else in the
package reads GLM53_* variables.
"""
# `setting` returns a dataclass field, which the linter cannot see.
# ruff: noqa: RUF009

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from . import config_values as values
from .config_values import ENV_PREFIX, Spec, setting
from .errors import ConfigError, nearest

SYSTEM_CONFIG = Path("/etc/glm53/config.toml")
SERVICE_STATE = Path("/var/lib/glm53")
CONFIG_VARIABLE = "GLM53_CONFIG"

OBSOLETE: Mapping[str, str] = {
    "GLM53_CT_SWZ": "the CPU tier reads the one pinned copy of the experts in place; there is no second copy to enable",
    "GLM53_ROOT": "the wheel knows where it is installed; nothing replaces it",
}
"""Variables of the container image this system replaces which mean nothing here: accepted, with a warning."""


def _own_folder(variable: str, usual: str) -> Path:
    """glm53's folder in systemd's state directory when the service runs, else below $`variable` or `usual`; where the
    user has no home folder (no HOME, no account), the service's."""
    state = os.environ.get("STATE_DIRECTORY")
    if state:
        return Path(state.split(":")[0])
    try:
        return Path(os.environ.get(variable) or usual).expanduser() / "glm53"
    except RuntimeError:
        return SERVICE_STATE


def default_model_dir() -> Path:
    """systemd's state directory when the service runs, the user's data directory otherwise."""
    return _own_folder("XDG_DATA_HOME", "~/.local/share") / "model"


def default_state_dir() -> Path:
    """Where learned routing statistics are kept between runs."""
    return _own_folder("XDG_STATE_HOME", "~/.local/state")


@dataclass(frozen=True)
class Settings:
    """Resolved settings. `None` in a field whose default is `auto` means: measure or derive it at load."""

    # model
    model_dir: Path = setting(
        default_model_dir, values.path, "model", "folder of the EXL3 checkpoint", flags=("--model-dir", "-m")
    )
    model_repo: str = setting(
        "turboderp/GLM-5.3-Flash-exl3", values.text, "model", "Hugging Face repository to download"
    )
    model_revision: str = setting("3.05bpw", values.text, "model", "branch, tag or commit of the repository")
    download: bool = setting(
        True, values.truth, "model", "download the checkpoint when config.json is missing", switch=True
    )
    chat_template: str = setting(
        "builtin", values.text, "model", "builtin, checkpoint (its own jinja file), or a jinja file"
    )
    state_dir: Path = setting(default_state_dir, values.path, "model", "folder for what is learned between runs")

    # engine
    mode: Literal["fast", "exact"] = setting(
        "fast", values.choice("fast", "exact"), "engine", "fast (CPU tier) or exact (equal to stock exllamav3)"
    )
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto",
        values.choice("auto", "cuda", "cpu"),
        "engine",
        "auto and cuda need an NVIDIA GPU; cpu is for trying and testing",
    )
    gpu: int = setting(0, values.integer(0, 63), "engine", "index of the GPU", flags=("--gpu", "-gpu"))
    cache_tokens: int = setting(
        131072,
        values.integer(256),
        "engine",
        "size of the KV cache; a smaller one leaves room for more expert slots",
        unit="tokens",
        flags=("--cache-tokens", "-cs", "--cache-size", "--cache_size"),
    )
    max_batch_size: int = setting(
        8,
        values.integer(1, 64),
        "engine",
        "streams that run at once, as far as autosplit_max_batch_size allows; others wait",
        flags=("--max-batch-size", "--max_batch_size"),
    )
    chunk_size: int = setting(
        8192,
        values.integer(256),
        "engine",
        "most prompt tokens in one prefill pass",
        unit="tokens",
        flags=("--chunk-size", "-chunk_size", "--chunk_size"),
    )
    autosplit_max_batch_size: int = setting(
        4,
        values.integer(1, 8),
        "engine",
        "streams that decode together in one step",
        flags=("--autosplit-max-batch-size", "-ambs", "--autosplit_max_batch_size"),
    )
    mtp: int = setting(
        0,
        values.integer(0, 7),
        "engine",
        "tokens a step that the checkpoint's MTP layer drafts while that measures faster (fast mode on a GPU); 0 = off",
        unit="tokens",
    )
    run_ahead: bool = setting(
        False,
        values.truth,
        "engine",
        "queue decode steps on the GPU before the last one's tokens are handed out; what it gains is not measured yet",
        switch=True,
    )

    # server
    host: str = setting("127.0.0.1", values.text, "server", "address to listen on; 0.0.0.0 for all")
    port: int = setting(30000, values.integer(0, 65535), "server", "TCP port", flags=("--port", "-p"))
    served_name: str = setting(
        "glm-5.3-flash", values.text, "server", "model name in the API", flags=("--served-name", "--served-model-name")
    )
    api_keys: tuple[str, ...] = setting(
        (), values.keys, "server", "keys accepted as bearer tokens; none = open", flags=("--api-key",), secret=True
    )
    api_key_file: Path | None = setting(None, values.auto(values.path), "server", "file with one API key a line")
    max_queue: int = setting(64, values.integer(0), "server", "requests that may wait before 503", unit="requests")
    drain_s: float = setting(
        30.0, values.number(0), "server", "time running streams get to finish on stop", unit="s", flags=("--drain",)
    )
    max_n: int = setting(8, values.integer(1, 64), "server", "most answers one request may ask for")
    max_body_mib: float = setting(
        16.0,
        values.number(0, above=True),
        "server",
        "largest request body; while one is parsed, other requests wait some 4 ms a MiB",
        unit="MiB",
    )
    body_timeout_s: float = setting(
        60.0,
        values.number(0),
        "server",
        "time a client has to send its request",
        unit="s",
        flags=("--body-timeout",),
    )
    request_timeout_s: float = setting(
        3600.0,
        values.number(0),
        "server",
        "longest life of a request; 0 = no limit",
        unit="s",
        flags=("--request-timeout",),
    )
    write_timeout_s: float = setting(
        60.0,
        values.number(0),
        "server",
        "time a client may read nothing before it is dropped",
        unit="s",
        flags=("--write-timeout",),
    )
    ping_s: float = setting(
        10.0, values.number(0, above=True), "server", "longest silence in a stream", unit="s", flags=("--ping",)
    )
    cors_origins: tuple[str, ...] = setting(
        ("auto",),
        values.words,
        "server",
        "web origins that may call the API; * = any, auto = any with an API key, else pages of this machine",
    )
    log_requests: bool = setting(True, values.truth, "server", "one log line a request", switch=True)

    # CPU tier
    ct_cpus: tuple[int, ...] | None = setting(
        None,
        values.auto(values.cpu_list),
        "CPU tier",
        "CPUs of the worker threads, like 2-23; auto = one a physical core, first two cores left free",
    )
    ct_threads: int | None = setting(
        None, values.auto(values.integer(1, 1024)), "CPU tier", "worker threads; auto = one a CPU of ct_cpus"
    )
    ct_a: float | None = setting(
        None,
        values.auto(values.number(0)),
        "CPU tier",
        "cost of handing a layer's work to the CPU and taking its sum back; auto = measured at load",
        unit="ms",
    )
    ct_b: float | None = setting(
        None,
        values.auto(values.number(0, above=True)),
        "CPU tier",
        "cost of one expert on the CPU; auto = measured at load",
        unit="ms",
    )
    ct_t: float | None = setting(
        None,
        values.auto(values.number(0, above=True)),
        "CPU tier",
        "cost of one expert over PCIe; auto = measured at load",
        unit="ms",
    )
    ct_g: float | None = setting(
        None,
        values.auto(values.number(0)),
        "CPU tier",
        "cost of a layer's experts in VRAM; auto = derived from a copy measured at load",
        unit="ms",
    )
    isa: Literal["scalar", "avx2", "avx512", "avx512w", "amx"] | None = setting(
        None,
        values.auto(values.choice("scalar", "avx2", "avx512", "avx512w", "amx")),
        "CPU tier",
        "kernels: scalar, avx2, avx512, avx512w (AVX-512 in 16-bit lanes), amx (with tiles); auto = the fastest here",
    )

    # expert cache
    ec_reserve_gb: float | None = setting(
        None,
        values.auto(values.number(0)),
        "expert cache",
        "VRAM left free; auto = 1.5 in fast, 1.0 in exact",
        unit="GB",
    )
    ec_elastic_gb: float = setting(
        10.0, values.number(0), "expert cache", "slots that long prefills may borrow", unit="GB"
    )
    ec_stage_gb: float = setting(
        2.6, values.number(0), "expert cache", "size of each of the two staging buffers", unit="GB"
    )
    triton_pin: Path | None = setting(
        None,
        values.auto(values.path),
        "expert cache",
        "file with the KDA kernels' autotune picks; auto = the one shipped for this GPU architecture",
    )

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def reserve_gb(self) -> float:
        """VRAM kept free after the expert cache is sized, in GB (10^9 bytes)."""
        if self.ec_reserve_gb is not None:
            return self.ec_reserve_gb
        return 1.5 if self.mode == "fast" else 1.0

    def max_streams(self) -> int:
        """Streams that run at once: the smaller of the two limits."""
        return min(self.max_batch_size, self.autosplit_max_batch_size)

    def all_api_keys(self) -> tuple[str, ...]:
        """`api_keys` and the lines of `api_key_file`. Raises ConfigError for a file that cannot be read or has none."""
        if self.api_key_file is None:
            return self.api_keys
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except OSError as e:
            raise ConfigError(
                f"api_key_file: cannot read {self.api_key_file} ({e.strerror}); name a file that this user may read"
            ) from None
        except UnicodeDecodeError as e:
            raise ConfigError(
                f"api_key_file: {self.api_key_file} is not UTF-8 text ({e}); write one key a line"
            ) from None
        found = [key for key in (line.strip() for line in lines) if key and not key.startswith("#")]
        if not found:
            raise ConfigError(
                f"api_key_file: no key in {self.api_key_file}; write one a line, or leave it out for an open server"
            )
        return (*self.api_keys, *found)


def specs() -> tuple[Spec, ...]:
    """All settings in the order they are declared."""
    out = []
    for f in fields(Settings):
        if f.metadata:
            default = f.default_factory if callable(f.default_factory) else f.default
            out.append(Spec(f.name, default, **f.metadata))
    return tuple(out)


_SPECS = {s.name: s for s in specs()}


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
        raise ConfigError(f'{path}: not valid TOML: {e}; text stands in quotes, like mode = "fast"') from None


def _from_file(path: Path, must_exist: bool) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    for key, value in _read_toml(path, must_exist).items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: [{key}]: settings are in no table; write each by itself, like port = 30000")
        if key not in _SPECS:
            known = nearest(key.lower().removeprefix(ENV_PREFIX.lower()), _SPECS)
            raise ConfigError(f"{path}: unknown setting {key!r}{known}")
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
    overrides: Mapping[str, object] | None = None, *, env: Mapping[str, str] | None = None, config: Path | None = None
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
    resolved = {name: _parsed(_SPECS[name], value, source) for name, (value, source) in raw.items()}
    sources = {name: raw[name][1] if name in raw else "default" for name in _SPECS}
    return Settings(**resolved, sources=sources, warnings=tuple(warnings))


def print_config(settings: Settings) -> str:
    """The resolved values as TOML, each with where it came from. Secrets are counted, never shown."""
    lines = []
    for spec in _SPECS.values():
        value = getattr(settings, spec.name)
        shown = f'"<{len(value)} hidden>"' if spec.secret and value else values.toml_value(value)
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
        shown = {"model_dir": SERVICE_STATE / "model", "state_dir": SERVICE_STATE}.get(spec.name)
        default = shown or (spec.default() if callable(spec.default) else spec.default)
        unit = f" [{spec.unit}]" if spec.unit else ""
        lines += ["", f"# {spec.help}{unit}", f"#{spec.name} = {values.toml_value(default)}"]
    return "\n".join(lines) + "\n"
