"""Laws of the configuration: strictness, overrides, one message for all faults, round trips."""

from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from core import config
from core.config import Section, describe, help_text, load_config, raise_field_faults, read_yaml, to_yaml
from core.errors import UserError

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)


class Alpha(Section):
    target: Literal["alpha"] = Field(alias="_target_", description="Kind.")
    width: int = Field(4, ge=1, description="Channels.")


class Beta(Section):
    target: Literal["beta"] = Field(alias="_target_", description="Kind.")
    names: tuple[str, ...] = Field((), description="Names.")


class Inner(Section):
    rate: float = Field(0.5, ge=0, lt=1, description="A share.")
    pair: tuple[float, float] = Field((0.9, 0.999), description="Two numbers.")
    fused: bool | None = Field(None, description="Three states.")
    low: int = Field(0, description="Lower bound.")
    high: int = Field(10, description="Upper bound.")

    @model_validator(mode="after")
    def _check(self):
        raise_field_faults([("low", f"must not exceed high {self.high}")] if self.low > self.high else [])
        return self


class Root(Section):
    part: Annotated[Alpha | Beta, Field(discriminator="target", description="A part.")]
    inner: Inner = Inner()
    option: Inner | None = Field(None, description="A second one.")
    paths: str | tuple[str, ...] | dict[str, int] = Field("data", description="Where.")
    table: dict[str, bool | int | float | str | None] = Field({}, description="Free values.")
    mode: Literal["fast", "exact"] = Field("fast", description="How.")
    name: str | None = Field(None, description="A name.")
    on: bool = Field(True, description="A switch.")


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "run.yaml"

    def write(text):
        path.write_text(text, encoding="utf-8")
        return path

    return write


PART = "part: {_target_: alpha}\n"


def fault(path, overrides=()):
    with pytest.raises(UserError) as caught:
        load_config(Root, path, overrides)
    return str(caught.value)


# --- YAML ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [
    ("1e-3", 1e-3), ("4e-7", 4e-7), ("1E5", 1e5), (".5", 0.5), ("-2.", -2.0), ("+1.5e+2", 150.0),
    ("010", 10), ("0x1F", 31), ("0o17", 15), ("-7", -7),
    ("true", True), ("false", False), ("null", None), ("~", None), ("", None),
    ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"), ("1:30", "1:30"),
    ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("'2'", "2"), ("e5", "e5"), (".", "."),
])  # fmt: skip
def test_scalars_follow_yaml_1_2(write, text, value):
    seen = read_yaml(write(f"a: {text}\n"))["a"]
    assert seen == value and type(seen) is type(value)


@SETTINGS
@given(st.floats(allow_nan=False))
def test_every_float_of_python_reads_as_a_float(write, x):
    text = repr(x).replace("inf", ".inf")
    seen = read_yaml(write(f"a: {text}"))["a"]
    assert seen == x and isinstance(seen, float)


@pytest.mark.parametrize("text, where, words", [
    ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", ":5:3", "duplicate key 'c', first in line 3"),
    ("a: [1, 2\nb: 3\n", ":2:", "expected ',' or ']'"),
    ("a: &x [*x]\n", ":1:", "recursive"),
    ("a: !!python/object/apply:os.getcwd []\n", ":1:4", "not allowed"),
    ("1: a\n", ":1:1", "quote it"),
    ("- a\n- b\n", "", "must hold a mapping"),
])  # fmt: skip
def test_bad_yaml_names_the_place(write, text, where, words):
    message = fault(write(text))
    assert f"run.yaml{where}" in message and words in message


def test_missing_file(tmp_path):
    assert f"{tmp_path}/none.yaml: no such file" == fault(tmp_path / "none.yaml")


def test_merge_keys_and_anchors(write):
    data = read_yaml(write("a: &base {x: 1, y: 2}\nb: {<<: *base, y: 3}\n"))
    assert data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


# --- Strictness ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, words", [
    ("on: 'true'", ["on must be a bool", '"true" (text)']),
    ("on: 1", ["on must be a bool", "1 (int)"]),
    ("on: yes", ["on must be a bool", '"yes"']),
    ("inner: {fused: 'true'}", ["inner.fused must be a bool or null", '"true"']),
    ("inner: {low: true}", ["inner.low must be an int", "true (bool)"]),
    ("inner: {low: '3'}", ["inner.low must be an int", '"3" (text)']),
    ("inner: {low: 1.0}", ["inner.low must be an int", "1.0 (float)", "write 1"]),
    ("inner: {rate: true}", ["inner.rate must be a float", "true (bool)"]),
    ("inner: {rate: 1}", ["inner.rate must be a float >= 0 and < 1", "1 (int)"]),
    ("inner: {pair: [1.0]}", ["inner.pair"]),
    ("inner: {pair: [1.0, x]}", ["inner.pair[1] must be a float", '"x"']),
    ("inner: {pair: [.nan, 0.1]}", ["inner.pair[0] must be a float"]),
    ("inner:", ["inner must be a section, got null", "write {}"]),
    ("mode: exakt", ["mode must be one of fast, exact", "did you mean 'exact'?"]),
    ("name: 3", ["name must be text or null", "3 (int)"]),
    ("paths: {a: x}", ["paths must be text or list of text or mapping of text to int", '{"a": "x"}']),
    ("inner: {rat: 0.1}", ["inner.rat is not a known key", "did you mean 'rate'?", "known here: rate, pair"]),
    ("fused: true", ["fused is not a known key", "did you mean 'inner.fused'?"]),
    ("part: {_target_: alpha, width: 0}", ["part.width must be an int >= 1", "0 (int)"]),
    ("part: {_target_: alpha, names: [a]}", ["part.names is not a known key", "known here: _target_, width"]),
    ("part: {_target_: alfa}", ['part._target_ is "alfa" (did you mean', "allowed: alpha, beta"]),
    ("part: {}", ["part._target_ is required", "allowed: alpha, beta"]),
    ("inner: {low: 3, high: 2}", ["inner.low must not exceed high 2"]),
    ("option: {low: 3, high: 2}", ["option.low must not exceed high 2"]),
])  # fmt: skip
def test_a_fault_names_key_value_and_what_is_allowed(write, text, words):
    message = fault(write(text if text.startswith("part") else PART + text))
    assert "run.yaml: 1 fault in the configuration" in message
    assert all(word in message for word in words), message


def test_all_faults_come_in_one_message(write):
    message = fault(write("on: 1\nmode: x\ninner: {low: a, hihg: 3}\n"), ["stray", "--option", "3", "--name"])
    for words in ("part._target_ is required", "on must be", "mode must be", "inner.low must be", "inner.hihg",
                  "unexpected argument 'stray'", "option must be", "--name needs a value"):  # fmt: skip
        assert words in message
    assert "8 faults" in message and message.count("\n") == 8


def test_integers_serve_as_floats_and_lists_as_tuples(write):
    root = load_config(Root, write(PART + "inner: {rate: 0, pair: [0, 1]}\npaths: [a, b]\n"))
    assert root.inner.rate == 0.0 and isinstance(root.inner.rate, float)
    assert root.inner.pair == (0.0, 1.0) and root.paths == ("a", "b")


def test_free_values_keep_their_types(write):
    values = {"a": True, "b": 1, "c": 1.5, "d": "1", "e": None, "f": 0, "g": False, "h": 0.0}
    table = load_config(Root, write(PART + yaml.safe_dump({"table": values}))).table
    assert [(k, v, type(v)) for k, v in table.items()] == [(k, v, type(v)) for k, v in values.items()]


def test_objects_are_frozen(write):
    root = load_config(Root, write(PART))
    with pytest.raises(ValueError, match="frozen"):
        root.on = False


# --- Overrides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, get, value", [
    (["--on", "false"], lambda r: r.on, False),
    (["--inner.fused=true"], lambda r: r.inner.fused, True),
    (["--inner.fused", "null"], lambda r: r.inner.fused, None),
    (["--inner.rate", "1e-3"], lambda r: r.inner.rate, 1e-3),
    (["--inner.low", "-3"], lambda r: r.inner.low, -3),
    (["--name", "2"], lambda r: r.name, "2"),
    (["--name", "true"], lambda r: r.name, "true"),
    (["--name", "1e-3"], lambda r: r.name, "1e-3"),
    (["--name", "null"], lambda r: r.name, None),
    (["--name", "'null'"], lambda r: r.name, "null"),
    (["--name", "a: b #c [d"], lambda r: r.name, "a: b #c [d"),
    (["--name", "[x]"], lambda r: r.name, "[x]"),
    (["--name", "{x"], lambda r: r.name, "{x"),
    (["--name", "&a *b"], lambda r: r.name, "&a *b"),
    (["--name=a=b"], lambda r: r.name, "a=b"),
    (["--name=--x"], lambda r: r.name, "--x"),
    (["--name", '""'], lambda r: r.name, ""),
    (["--name", "a", "--name", "b"], lambda r: r.name, "b"),
    (["--paths", "7"], lambda r: r.paths, "7"),
    (["--paths", "[a, b]"], lambda r: r.paths, ("a", "b")),
    (["--paths", "[]"], lambda r: r.paths, ()),
    (["--table", "{a: 1, b: x}"], lambda r: r.table, {"a": 1, "b": "x"}),
    (["--table.depth", "2"], lambda r: r.table, {"depth": 2}),
    (["--option.low", "2"], lambda r: r.option, Inner(low=2)),
    (["--option", "{}"], lambda r: r.option, Inner()),
    (["--part.names", "[x]", "--part._target_", "beta"], lambda r: r.part.names, ("x",)),
    (["--part.width", "5"], lambda r: r.part.width, 5),
])  # fmt: skip
def test_override_is_coerced_to_the_field(write, args, get, value):
    seen = get(load_config(Root, write(PART), args))
    assert seen == value and type(seen) is type(value)


def test_null_turns_a_section_off(write):
    assert load_config(Root, write(PART + "option: {low: 1}\n"), ["--option", "null"]).option is None


def test_an_override_opens_a_section_that_is_null(write):
    assert load_config(Root, write(PART + "option: null\n"), ["--option.low", "1"]).option == Inner(low=1)


@pytest.mark.parametrize("text, args, words", [
    ("paths: {a: 300}", ["--paths", "b"], ["--paths b", 'paths is the mapping {"a": 300}']),
    ("paths: {a: 300}", ["--paths=3"], ['paths is the mapping {"a": 300}']),
    ("inner: {low: 1}", ["--inner", "null"], ['inner is the mapping {"low": 1}']),
    ("paths: a", ["--paths", "{b: 2}"], ['the mapping {"b": 2} cannot replace "a"']),
    ("paths: a", ["--paths.b", "2"], ['paths is "a", not a mapping', "'b'"]),
    ("", ["--iner.low", "2"], ["iner is not a known key", "did you mean 'inner'?", "(command line)"]),
    ("", ["--inner.lwo=2"], ["inner.lwo is not a known key", "did you mean 'low'?", "(command line)"]),
    ("", ["--inner.low", "x"], ["inner.low must be an int", '"x"', "(command line)"]),
    ("", ["--paths", "{b: x}"], ["paths must be text or list of text or mapping", '{"b": "x"}']),
    ("", ["--paths", "[a, b"], ["--paths [a, b:", "expected ',' or ']'"]),
    ("", ["--on", "yes"], ["on must be a bool", '"yes"']),
    ("", ["--on"], ["--on needs a value"]),
    ("", ["--on", "--name", "a"], ["--on needs a value"]),
    ("", ["--on="], ["--on needs a value"]),
    ("", ["on", "-x", "--", "--a..b=1"], ["'on'", "'-x'", "'--'", "'--a..b=1'"]),
])  # fmt: skip
def test_bad_override(write, text, args, words):
    message = fault(write(PART + text), args)
    assert all(word in message for word in [*words, "run.yaml"]), message


def test_a_mapping_replaces_a_mapping(write):
    assert load_config(Root, write(PART + "paths: {a: 3}"), ["--paths", "{b: 2}"]).paths == {"b": 2}


def test_command_line_marks_only_its_own_faults(write):
    lines = fault(write(PART + "on: 3\n"), ["--inner.low", "x"]).splitlines()
    assert [("command line" in line) for line in lines[1:]] == [True, False]


# --- Round trip and description ----------------------------------------------------------------------------

TEXT = st.text(max_size=12)
SHARE = st.floats(0, 1, exclude_max=True)
INNER = st.builds(Inner, rate=SHARE, pair=st.tuples(*[st.floats(-1e30, 1e30)] * 2), high=st.just(2**40),
                  fused=st.none() | st.booleans(), low=st.integers(-(2**40), 2**40))  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
TRICKY = st.sampled_from(["1e-3", "010", "true", "yes", "null", "", "<<", "=", "~", "1:30", ".inf", "a: b", "- x",
                          "#", "'", "x\ny\n", " a", "\x85", "\ufeff", "2024-01-01"])  # fmt: skip
ROOTS = st.builds(
    Root,
    part=st.builds(lambda n: Alpha(_target_="alpha", width=n), st.integers(1, 9))
    | st.builds(lambda n: Beta(_target_="beta", names=tuple(n)), st.lists(TEXT | TRICKY, max_size=3)),
    inner=INNER,
    option=st.none() | INNER,
    paths=TEXT | st.lists(TEXT, max_size=3).map(tuple) | st.dictionaries(TEXT | TRICKY, st.integers(), max_size=3),
    table=st.dictionaries(TEXT | TRICKY, SCALARS | TEXT | TRICKY, max_size=4),
    mode=st.sampled_from(["fast", "exact"]),
    name=st.none() | TEXT | TRICKY,
    on=st.booleans(),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(root=ROOTS)
def test_loading_what_was_written_gives_an_equal_object(tmp_path_factory, root):
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    config.save_config(root, path)
    again = load_config(Root, path)
    assert again == root
    # == holds between 1, 1.0 and True, so compare the types too.
    assert {k: type(v) for k, v in again.table.items()} == {k: type(v) for k, v in root.table.items()}
    assert to_yaml(again) == to_yaml(root)


def test_describe_lists_every_key(write):
    rows = {row.key: row for row in describe(Root)}
    resolved = read_yaml(write(to_yaml(Root(part=Beta(_target_="beta"), option=Inner(), table={}))))

    def leaves(data, prefix=""):
        for key, value in data.items():
            yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]

    assert set(leaves(resolved)) | {"part.width", "option"} == set(rows)
    assert rows["inner.rate"] == ("inner.rate", "float >= 0 and < 1", "0.5", "A share.")
    assert rows["inner.pair"][1:3] == ("list of 2 float", "[0.9, 0.999]")
    assert rows["part._target_"][1:3] == ("one of alpha, beta", "required")
    assert rows["option"][1:3] == ("section or null", "null")


def test_help_has_every_key_type_default_and_meaning():
    text = help_text(Root)
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100
    flat = " ".join(text.split())
    for row in describe(Root):
        assert all(part in flat for part in (f"{row.key} {row.type}", row.default, row.doc))
    assert "\x1b[" in help_text(Root, color=True)
