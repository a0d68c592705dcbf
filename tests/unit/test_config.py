"""Settings: what wins, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mlxinfer.config import Settings, as_dict, config_path, load_settings, source_of
from mlxinfer.errors import InvalidRequestError

NOWHERE = Path("/nonexistent/config.toml")


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_without_flag_variable_and_file_the_defaults_hold() -> None:
    assert load_settings(environ={}, path=NOWHERE) == Settings()


def test_the_file_wins_over_the_default(tmp_path: Path) -> None:
    assert load_settings(environ={}, path=config(tmp_path, "port = 9001")).port == 9001


def test_a_variable_wins_over_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "port = 9001\nhost = '10.0.0.1'")
    settings = load_settings(environ={"MLXINFER_PORT": "9002"}, path=path)
    assert (settings.port, settings.host) == (9002, "10.0.0.1")


def test_a_flag_wins_over_the_variable(tmp_path: Path) -> None:
    path = config(tmp_path, "port = 9001")
    assert load_settings({"port": 9003}, environ={"MLXINFER_PORT": "9002"}, path=path).port == 9003


def test_a_flag_of_none_was_not_given(tmp_path: Path) -> None:
    assert load_settings({"port": None}, environ={}, path=config(tmp_path, "port = 9001")).port == 9001


def test_an_empty_variable_was_not_given() -> None:
    assert load_settings(environ={"MLXINFER_PORT": ""}, path=NOWHERE).port == Settings().port


def test_variables_read_elsewhere_and_foreign_ones_are_left_alone() -> None:
    environ = {"MLXINFER_BLAS": "off", "MLXINFER_API_KEY": "k", "MLXINFER_CONFIG": "/x", "PORT": "1", "HF_HOME": "/y"}
    environ |= {"MLXINFER_THREADS": "2", "MLXINFER_KERNELS_ISA": "base", "MLXINFER_KERNELS_DIR": "/z"}
    environ |= {"MLXINFER_KERNELS_CXXFLAGS": "-g"}
    assert load_settings(environ=environ, path=NOWHERE) == Settings()


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Settings)])
def test_every_key_can_be_set_by_a_variable_and_by_the_file(tmp_path: Path, name: str) -> None:
    texts = {
        "model": "m",
        "host": "h",
        "cache_dir": "/c",
        "data_dir": "/d",
        "dtype": "float32",
        "kernels": "off",
        "keys_file": "/k",
    }
    texts |= {"access_log": "/l"}
    text = texts.get(name, "8" if name == "kv_bits" else "true" if name == "metrics_open" else "77")
    quoted = name in texts or name.startswith("allow_") or name == "adapters"
    path = config(tmp_path, f'{name} = "{text}"' if quoted else f"{name} = {text}")
    from_file = load_settings(environ={}, path=path)
    from_variable = load_settings(environ={f"MLXINFER_{name.upper()}": text}, path=NOWHERE)
    assert from_file == from_variable != Settings()
    shown = as_dict(from_file)[name]
    assert (
        ",".join(shown) if isinstance(shown, tuple) else str(shown).lower() if shown is True else str(shown)
    ) == text


def test_lists_come_as_lists_from_the_file_and_with_commas_from_a_variable(tmp_path: Path) -> None:
    path = config(tmp_path, 'allow_hosts = ["a.local", "b.local"]')
    assert load_settings(environ={}, path=path).allow_hosts == ("a.local", "b.local")
    environ = {"MLXINFER_ALLOW_HOSTS": "a.local, b.local,"}
    assert load_settings(environ=environ, path=NOWHERE).allow_hosts == ("a.local", "b.local")
    with pytest.raises(InvalidRequestError, match="allow_hosts must be a list of strings"):
        load_settings(environ={}, path=config(tmp_path, "allow_hosts = [1]"))


@pytest.mark.parametrize("value", ["1", '"true"', "[true]"])
def test_a_flag_of_the_file_is_true_or_false(tmp_path: Path, value: str) -> None:
    with pytest.raises(InvalidRequestError, match="metrics_open must be true or false"):
        load_settings(environ={}, path=config(tmp_path, f"metrics_open = {value}"))


def test_an_unknown_key_of_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "prot = 1")
    with pytest.raises(InvalidRequestError, match=r"unknown setting 'prot'; known: .*port") as error:
        load_settings(environ={}, path=path)
    assert str(path) in str(error.value)


def test_an_unknown_variable_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"\$MLXINFER_PROT"):
        load_settings(environ={"MLXINFER_PROT": "1"}, path=NOWHERE)


@pytest.mark.parametrize(
    "text", ["port = true", "port = '8080 '' '", "port = 1.5", "port = [1]", "host = 5", "host = true"]
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"config\.toml"):
        load_settings(environ={}, path=config(tmp_path, text))


def test_a_variable_that_is_no_integer_is_refused_with_its_value() -> None:
    with pytest.raises(InvalidRequestError, match=r"\$MLXINFER_PORT: port must be an integer, not 'http'"):
        load_settings(environ={"MLXINFER_PORT": "http"}, path=NOWHERE)


@pytest.mark.parametrize(
    ("key", "value"),
    [("port", -1), ("port", 65536), ("max_num_seqs", 0), ("max_queue", 0), ("prefill_chunk", 0), ("context_length", 0)],
)
def test_a_value_out_of_range_is_refused_with_value_and_limits(key: str, value: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{key} is {value}; it must be between") as error:
        load_settings({key: value}, environ={}, path=NOWHERE)
    assert error.value.param == key


@pytest.mark.parametrize("bits", [0, 2, 16, "4.5"])
def test_keys_are_packed_in_8_or_4_bits_or_not_at_all(bits: object) -> None:
    assert load_settings({"kv_bits": "4"}, environ={}, path=NOWHERE).kv_bits == 4
    with pytest.raises(InvalidRequestError, match="kv_bits"):
        load_settings({"kv_bits": bits}, environ={}, path=NOWHERE)


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="dtype is 'int8'"):
        load_settings({"dtype": "int8"}, environ={}, path=NOWHERE)


def test_kernels_are_auto_on_or_off() -> None:
    for value in ("auto", "on", "off"):
        assert load_settings({}, environ={"MLXINFER_KERNELS": value}, path=NOWHERE).kernels == value
    with pytest.raises(InvalidRequestError, match="kernels is 'yes'; it must be auto, on or off"):
        load_settings({}, environ={"MLXINFER_KERNELS": "yes"}, path=NOWHERE)


@pytest.mark.parametrize("data", [b"port = ", b"\xff\xfe", b"port = 1\nport = 2"])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(data)
    with pytest.raises(InvalidRequestError, match=r"config\.toml cannot be read as TOML"):
        load_settings(environ={}, path=path)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is a directory"):
        load_settings(environ={}, path=tmp_path)
    with pytest.raises(InvalidRequestError, match="is a directory"):
        load_settings(environ={"MLXINFER_CONFIG": str(tmp_path)})


@pytest.mark.parametrize("name", ["missing.toml", "config.toml/below-a-file"])
def test_a_file_that_the_variable_names_must_be_there_and_any_other_need_not(tmp_path: Path, name: str) -> None:
    config(tmp_path, "")
    with pytest.raises(InvalidRequestError, match=r"\$MLXINFER_CONFIG names .*no such file"):
        load_settings(environ={"MLXINFER_CONFIG": str(tmp_path / name)})
    assert load_settings(environ={"XDG_CONFIG_HOME": str(tmp_path / "nowhere")}) == Settings()


@pytest.mark.parametrize("key", ["port", "max_num_seqs", "max_queue", "prefill_chunk", "context_length"])
def test_a_text_in_place_of_a_number_is_refused_in_the_file_and_right_in_a_variable(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"config\.toml: {key} must be int, not '80'"):
        load_settings(environ={}, path=config(tmp_path, f"{key} = '80'"))
    assert getattr(load_settings(environ={f"MLXINFER_{key.upper()}": "80"}, path=NOWHERE), key) == 80


def test_a_relative_folder_is_below_the_files_folder_or_else_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    path = config(tmp_path, "cache_dir = 'c'")
    assert load_settings(environ={}, path=path).cache_dir == tmp_path / "c"
    assert load_settings(environ={}, path=Path("../config.toml")).cache_dir == tmp_path / "c"
    assert load_settings(environ={"MLXINFER_CACHE_DIR": "c"}, path=path).cache_dir == here / "c"
    assert load_settings({"cache_dir": "../d"}, environ={}, path=path).cache_dir == tmp_path / "d"


def test_the_source_of_a_value_is_the_variable_before_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "model = 'm'")
    assert source_of("model", environ={}, path=path) == str(path)
    assert source_of("model", environ={"MLXINFER_MODEL": "n"}, path=path) == "$MLXINFER_MODEL"
    assert source_of("model", environ={}, path=NOWHERE) is None


def test_the_file_is_where_the_variable_says_else_in_the_xdg_folder_else_in_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert config_path({"MLXINFER_CONFIG": "/a/b.toml", "XDG_CONFIG_HOME": "/x"}) == Path("/a/b.toml")
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/mlxinfer/config.toml")
    assert config_path({}) == Path("/home/u/.config/mlxinfer/config.toml")


def test_the_process_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_CONFIG", str(config(tmp_path, "max_queue = 7")))
    assert load_settings().max_queue == 7


def test_a_tilde_in_a_path_means_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert load_settings({"cache_dir": "~/c"}, environ={}, path=NOWHERE).cache_dir == Path("/home/u/c")


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_an_unknown_home_folder_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"MLXINFER_CACHE_DIR: cache_dir is '~nosuchuser/x'") as caught:
        load_settings(environ={"MLXINFER_CACHE_DIR": "~nosuchuser/x"}, path=tmp_path / "none.toml")
    assert caught.value.param == "cache_dir"
    with pytest.raises(InvalidRequestError, match="cache_dir must be a path"):
        load_settings({"cache_dir": "a\0b"}, environ={}, path=tmp_path / "none.toml")
    with pytest.raises(InvalidRequestError, match="XDG_CONFIG_HOME"):
        config_path({"XDG_CONFIG_HOME": "~nosuchuser"})
