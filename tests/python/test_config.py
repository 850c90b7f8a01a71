"""Settings: one merge, later wins, every wrong name or value named with where it came from."""

import tomllib
from pathlib import Path

import pytest

from glm53 import config
from glm53.config import Settings, example_config, load_settings, print_config, specs
from glm53.errors import ConfigError


@pytest.fixture(autouse=True)
def no_system_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "SYSTEM_CONFIG", tmp_path / "none.toml")


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_later_source_wins_and_is_named(tmp_path: Path) -> None:
    path = toml(tmp_path, 'port = 1111\nmode = "exact"\nhost = "0.0.0.0"\n')
    env = {"GLM53_PORT": "2222", "GLM53_MODE": "fast"}
    settings = load_settings({"port": "3333"}, env=env, config=path)
    assert (settings.port, settings.mode, settings.host) == (3333, "fast", "0.0.0.0")
    assert settings.sources["port"] == "command line"
    assert settings.sources["mode"] == "GLM53_MODE"
    assert settings.sources["host"] == str(path)
    assert settings.sources["served_name"] == "default"


def test_documented_defaults() -> None:
    s = load_settings(env={})
    assert (s.cache_tokens, s.max_batch_size, s.chunk_size, s.autosplit_max_batch_size) == (131072, 8, 8192, 4)
    assert (s.port, s.served_name, s.mode, s.gpu) == (30000, "glm-5.3-flash", "fast", 0)
    assert (s.model_repo, s.model_revision) == ("turboderp/GLM-5.3-Flash-exl3", "3.05bpw")
    assert (s.ec_elastic_gb, s.ec_stage_gb, s.ct_cpus, s.ct_b) == (10.0, 2.6, None, None)


@pytest.mark.parametrize(("mode", "reserve"), [("fast", 1.5), ("exact", 1.0)])
def test_reserve_follows_the_mode_unless_set(mode: str, reserve: float) -> None:
    assert load_settings({"mode": mode}, env={}).reserve_gb() == reserve
    assert load_settings({"mode": mode, "ec_reserve_gb": "0.5"}, env={}).reserve_gb() == 0.5


def test_every_tuning_variable_of_the_old_system_is_known() -> None:
    env = {
        "GLM53_MODE": "exact",
        "GLM53_MODEL_DIR": "/models",
        "GLM53_CT_CPUS": "2-4,8",
        "GLM53_CT_THREADS": "22",
        "GLM53_CT_B": "0.104",
        "GLM53_CT_SWZ": "1",
        "GLM53_EC_RESERVE_GB": "1.5",
        "GLM53_EC_ELASTIC_GB": "10",
        "GLM53_EC_STAGE_GB": "2.6",
        "GLM53_TRITON_PIN": "/pins.json",
        "GLM53_ROOT": "/app",
    }
    s = load_settings(env=env)
    assert s.ct_cpus == (2, 3, 4, 8)
    assert (s.ct_threads, s.ct_b, s.triton_pin, s.model_dir) == (22, 0.104, Path("/pins.json"), Path("/models"))
    assert [w.split()[0] for w in s.warnings] == ["GLM53_CT_SWZ", "GLM53_ROOT"]
    assert "one pinned copy" in s.warnings[0]


def test_unknown_names_are_errors_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GLM53_EC_RESRVE_GB; did you mean GLM53_EC_RESERVE_GB"):
        load_settings(env={"GLM53_EC_RESRVE_GB": "1"})
    path = toml(tmp_path, "chunksize = 1\n")
    with pytest.raises(ConfigError, match=rf"{path}: unknown setting 'chunksize'; did you mean chunk_size"):
        load_settings(env={}, config=path)
    for written in ("GLM53_CHUNK_SIZE", "Chunk-Size"):
        path = toml(tmp_path, f"{written} = 1\n")
        with pytest.raises(ConfigError, match=rf"unknown setting '{written}'; did you mean chunk_size"):
            load_settings(env={}, config=path)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", "65536", "0 to 65535"),
        ("port", "many", "whole number"),
        ("port", True, "whole number"),
        ("mode", "quick", "fast or exact"),
        ("ct_cpus", "5-2", "CPU list"),
        ("ct_cpus", "a", "CPU list"),
        ("ct_cpus", "0-99999999999", "CPU list"),
        ("ct_cpus", "0-8192", "CPU 8192 is beyond 8191"),
        ("ct_cpus", [2, True], "CPU list"),
        ("ct_cpus", {}, "CPU list"),
        ("isa", ["amx"], "must be scalar, avx2, avx512, avx512w or amx; or auto"),
        ("ct_threads", "many", "a whole number is needed; or auto"),
        ("model_repo", "  ", "non-empty"),
        ("model_dir", "a\0b", "non-empty"),
        ("ec_stage_gb", 10**400, "a number is needed"),
        ("ec_reserve_gb", [1], "a number is needed"),
        ("triton_pin", ["a"], "non-empty"),
        ("state_dir", "~nobody-of-this-name/x", "home folder is not known"),
        ("ct_b", "0", "above 0"),
        ("ct_b", "nan", "above 0"),
        ("ec_stage_gb", "inf", "at least 0 and finite"),
        ("download", "maybe", "true or false"),
        ("served_name", "", "non-empty"),
        ("autosplit_max_batch_size", "9", "1 to 8"),
    ],
)
def test_wrong_values_name_the_setting_and_the_source(name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_settings({name: value}, env={})
    assert "command line" in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cpus"), [("[2, 3]", (2, 3)), ("4", (4,)), ('"2-3,4"', (2, 3, 4)), ('["2-3"]', (2, 3))]
)
def test_toml_may_name_cpus_by_number(tmp_path: Path, text: str, cpus: tuple[int, ...]) -> None:
    assert load_settings(env={}, config=toml(tmp_path, f"ct_cpus = {text}\n")).ct_cpus == cpus


def test_a_table_is_not_mistaken_for_a_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[server\]: settings are in no table"):
        load_settings(env={}, config=toml(tmp_path, "[server]\nport = 3\n"))


def test_without_any_home_folder_the_service_s_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("STATE_DIRECTORY", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "expanduser", none)
    settings = load_settings(env={})
    assert settings.model_dir == Path("/var/lib/glm53/model")
    assert settings.state_dir == Path("/var/lib/glm53")


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_settings(env={}, config=tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings(env={}, config=toml(tmp_path, "port = \n"))
    with pytest.raises(ConfigError, match=r'line 1, column 8\); text stands in quotes, like mode = "fast"'):
        load_settings(env={}, config=toml(tmp_path, "mode = fast\n"))
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_settings(env={"GLM53_CONFIG": str(tmp_path / "absent.toml")})


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    s = load_settings({"api_keys": "sk-one,sk-two"}, env={})
    assert s.api_keys == ("sk-one", "sk-two")
    assert "sk-" not in print_config(s)
    assert "<2 hidden>" in print_config(s)
    with pytest.raises(ConfigError) as caught:
        load_settings({"api_keys": 7}, env={})
    assert "7" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings(env={}, config=toml(tmp_path, 'api_keys = ["sk-secret", 3]\n'))
    assert "sk-secret" not in str(caught.value)


def test_api_key_file_adds_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# clients\nalpha\n\nbeta\n")
    s = load_settings({"api_keys": "gamma", "api_key_file": str(keys)}, env={})
    assert s.all_api_keys() == ("gamma", "alpha", "beta")
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({"api_key_file": str(tmp_path / "none")}, env={}).all_api_keys()


def test_keys_that_are_none_never_open_a_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GLM53_API_KEYS: api_keys .* a key is needed"):
        load_settings(env={"GLM53_API_KEYS": ""})
    with pytest.raises(ConfigError, match=r"command line: api_keys .* a key is needed"):
        load_settings({"api_keys": " , "}, env={})
    for text in ('[""]', '["", " "]', '""'):  # as a template leaves it whose variable is not set
        with pytest.raises(ConfigError, match=r"config.toml: api_keys .* a key is needed"):
            load_settings(env={}, config=toml(tmp_path, f"api_keys = {text}\n"))
    assert load_settings(env={}, config=toml(tmp_path, "api_keys = []\n")).all_api_keys() == ()
    keys = tmp_path / "keys"
    for text, says in ((b"  # only a comment\n\n", "no key in"), (b"\xff\xfe\x00", "not UTF-8 text")):
        keys.write_bytes(text)
        with pytest.raises(ConfigError, match=f"api_key_file: .*{says}"):
            load_settings({"api_key_file": str(keys)}, env={}).all_api_keys()


def test_printed_values_can_be_loaded_again(tmp_path: Path) -> None:
    first = load_settings({"ct_cpus": "2-5", "cors_origins": "a,b", "mode": "exact", "ec_reserve_gb": 0.7}, env={})
    assert load_settings(env={}, config=toml(tmp_path, print_config(first))) == first


def test_example_has_every_setting_with_its_default(tmp_path: Path) -> None:
    text = example_config()
    live = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#") and line[1:2].isalpha())
    values = tomllib.loads(live)
    assert set(values) == {s.name for s in specs()}
    loaded = load_settings(env={}, config=toml(tmp_path, live))
    for spec in specs():
        if not callable(spec.default):
            assert getattr(loaded, spec.name) == spec.default, spec.name


def test_shipped_example_is_in_step() -> None:
    shipped = Path(__file__).parents[2] / "systemd" / "config.toml"
    assert shipped.read_text() == example_config(), "regenerate systemd/config.toml from glm53.config.example_config()"


def test_state_directory_of_systemd_holds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/glm53")
    assert Settings().model_dir == Path("/var/lib/glm53/model")
    assert Settings().state_dir == Path("/var/lib/glm53")
