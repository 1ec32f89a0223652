"""Configuration: one YAML file and dotted overrides, validated strictly into frozen typed sections.

Nothing is guessed: the text `"true"` is not a bool, `true` is not an int, an unknown key is an error. All
faults come in one message, each with its full dotted key, the value seen and what is allowed.
"""

import copy
import io
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import annotated_types
import pydantic
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from core.errors import UserError, nearest_names, raise_faults
from core.files import atomic_file

TARGET = "_target_"
ABSENT = object()


class Section(pydantic.BaseModel):
    """A frozen group of keys. Subclasses give every field a type and a `Field(description=...)`."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


S = TypeVar("S", bound=Section)


class Label(NamedTuple):
    """Annotation metadata: the name that messages and help give to a type."""

    text: str


def raise_field_faults(faults: Sequence[tuple[str, str]]) -> None:
    """For cross-field validators: raises one error with `(field, what is wrong)` pairs; none, no error.

    `field` is relative to the validating section and may be dotted; `load_config` prints the full key.
    """
    if faults:
        text = "; ".join(f"{field} {what}" for field, what in faults)
        raise PydanticCustomError("field_faults", "{text}", {"text": text, "faults": list(faults)})


# --- YAML 1.2 core schema -------------------------------------------------------------------------------
# PyYAML reads YAML 1.1, where 1e-3 is text, `no` is false and 010 is 8. These tables serve the loader and
# the dumper alike, so that text which looks like a number is quoted when written.
RESOLVERS = (
    ("tag:yaml.org,2002:bool", r"(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("tag:yaml.org,2002:null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("tag:yaml.org,2002:float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", "-+."),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _resolver_table() -> dict[str, list]:
    table: dict[str, list] = {}
    for tag, pattern, firsts in RESOLVERS:
        for first in firsts:
            table.setdefault(first, []).append((tag, re.compile(rf"^{pattern}$")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolver_table()
    yaml_constructors = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolver_table()

    def ignore_aliases(self, data):
        return True


def _mapping(loader, node):
    # Built at once, not as PyYAML's two-step generator: a mapping that contains itself is then refused.
    seen: dict[str, Any] = {}
    for key_node, _ in node.value:
        key, line = loader.construct_object(key_node, deep=True), key_node.start_mark
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} must be text: quote it", line)
        if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
            first = seen[key].line + 1
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}, first in line {first}", line)
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


def _int(loader, node):
    text = loader.construct_scalar(node)
    return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))


def _unknown_tag(loader, node):
    raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not allowed", node.start_mark)


for _tag, _build in {
    "null": lambda loader, node: None,
    "bool": lambda loader, node: {"true": True, "false": False}[loader.construct_scalar(node).lower()],
    "int": _int,
    "float": lambda loader, node: loader.construct_yaml_float(node),
    "str": lambda loader, node: loader.construct_scalar(node),
    "merge": lambda loader, node: loader.construct_scalar(node),
    "seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    "map": _mapping,
}.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _build)
_Loader.add_constructor(None, _unknown_tag)
# PyYAML loses some line separators (U+0085) in single quotes; double quotes escape them.
_Dumper.add_representer(
    str, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')
)
_Dumper.add_representer(list, lambda d, data: d.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file (1.2 core schema); an empty file is an empty mapping.

    Raises UserError naming file, line and column: missing file, bad syntax, duplicate keys, other tags.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, KeyError) as error:
        raise UserError(f"{path}{_mark(error)}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict | None):
        raise UserError(f"{path}: the file must hold a mapping of keys, got {show(data)}")
    return data if data is not None else {}


def _mark(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"


# --- Types ----------------------------------------------------------------------------------------------


def _keys(section: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """A type and its constraints: `Annotated[int, Field(ge=1)] -> (int, [Ge(1)])`."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation, []
    core, *metadata = typing.get_args(annotation)
    return core, [m for entry in metadata for m in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _slot(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _members(annotation: Any) -> list[Any]:
    core, _ = _unwrap(annotation)
    return list(typing.get_args(core)) if typing.get_origin(core) in (typing.Union, types.UnionType) else [annotation]


def _sections(annotation: Any, data: Any = None) -> list[type[Section]]:
    """The sections that a type may be; only those of `data`'s `_target_` when it names one."""
    found = [m for a in _members(annotation) if isinstance(m := _unwrap(a)[0], type) and issubclass(m, Section)]
    target = data.get(TARGET) if isinstance(data, dict) else None
    return [s for s in found if target in _targets([s])] or found


def _targets(sections: Sequence[type[Section]]) -> list[str]:
    fields = [_keys(s)[TARGET] for s in sections if TARGET in _keys(s)]
    return [value for field in fields for value in typing.get_args(field.annotation)]


def _child(annotation: Any, piece: str | int, data: Any) -> Any:
    """The type of one key or index inside a value of type `annotation`; None when there is no such place."""
    for section in _sections(annotation, data):
        if piece in _keys(section):
            return _slot(_keys(section)[piece])
    for member in _members(annotation):
        core, _ = _unwrap(member)
        origin, args = typing.get_origin(core), typing.get_args(core)
        if origin is dict and isinstance(piece, str):
            return args[1]
        if origin in (list, tuple) and isinstance(piece, int):
            variadic = origin is list or args[-1] is Ellipsis
            return args[0] if variadic else args[piece] if piece < len(args) else None
    return None


def _accepts(annotation: Any, value: Any) -> bool:
    try:
        pydantic.TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError:
        return False
    return True


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [f"{sign} {getattr(m, name)}" for m in metadata for name, sign in signs.items() if hasattr(m, name)]
    return " " + " and ".join(limits) if limits else ""


def type_text(annotation: Any, inherited: Sequence[Any] = ()) -> str:
    """A type in words: `int >= 1 or null`, `one of fp32, bf16`, `list of text`, `section`."""
    core, metadata = _unwrap(annotation)
    metadata = [*metadata, *inherited]
    origin, args = typing.get_origin(core), typing.get_args(core)
    for label in (m.text for m in metadata if isinstance(m, Label)):
        return label
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(a, metadata) for a in args))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(a) for a in args)
    if origin is dict:
        return f"mapping of text to {type_text(args[1])}"
    if origin in (list, tuple):
        count = "" if origin is list or args[-1] is Ellipsis else f"{len(args)} "
        least = "".join(f", at least {m.min_length}" for m in metadata if isinstance(m, annotated_types.MinLen))
        return f"list of {count}{type_text(args[0])}{least}"
    if isinstance(core, type) and issubclass(core, Section):
        return "section"
    names = {str: "text", Path: "text", type(None): "null", Any: "any value"}
    return names[core] if core in names else core.__name__ + _bounds(metadata)


def _must_be(annotation: Any) -> str:
    text = type_text(annotation)
    article = "an " if text.startswith("int") else "a " if re.match("bool|float|list|mapping|section", text) else ""
    return f"must be {article}{text}"


def show(value: Any) -> str:
    """A value as it would stand in a message: JSON, cut at 200 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else text[:197] + "..."


def _kind(value: Any) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "text"}
    return f" ({names[type(value)]})" if type(value) in names else ""


# --- Overrides ------------------------------------------------------------------------------------------


def parse_overrides(args: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """`["--a.b", "1", "--c=2"] -> ([("a.b", "1"), ("c", "2")], faults)`."""
    pairs, faults, rest = [], [], list(args)
    while rest:
        word = rest.pop(0)
        key, equals, value = word[2:].partition("=")
        if not word.startswith("--") or not all(key.split(".")):
            faults.append(f"unexpected argument {word!r}: overrides are written --section.key value")
            continue
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if value == "":
            faults.append(f"--{key} needs a value (null for none, '\"\"' for empty text)")
            continue
        pairs.append((key, value))
    # Targets first: they decide which types the other keys of their section have.
    return sorted(pairs, key=lambda pair: not pair[0].endswith(TARGET)), faults


def _takes_collections(annotation: Any) -> bool:
    return any(typing.get_origin(_unwrap(m)[0]) in (dict, list, tuple) for m in _members(annotation))


def _override_value(annotation: Any, text: str) -> Any:
    """Command-line text as a YAML value that fits `annotation`; text for a text field stays text.

    Raises UserError for a malformed `[...]` or `{...}` where the field takes lists or mappings.
    """
    flow = text.lstrip()[:1] in ("[", "{") and annotation is not None and _takes_collections(annotation)
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, KeyError) as error:
        if flow:
            raise UserError(f"{text}: {getattr(error, 'problem', None) or error}") from None
        value = text
    if isinstance(value, str) and text.lstrip()[:1] not in ("'", '"'):
        value = text
    fits = annotation is None or flow or _accepts(annotation, value) or not _accepts(annotation, text)
    return value if fits else text


def _apply_override(model_cls: type[Section], data: dict[str, Any], key: str, text: str) -> str | None:
    """Sets one dotted key in `data`, creating mappings on the way; returns a fault or None."""
    annotation, node = model_cls, data
    *parents, last = key.split(".")
    for depth, part in enumerate(parents, 1):
        annotation = _child(annotation, part, node) if annotation is not None else None
        if node.get(part) is None:
            node[part] = {}
        if not isinstance(node[part], dict):
            above = ".".join(parents[:depth])
            return f"--{key}: {above} is {show(node[part])}, not a mapping that could hold {last!r}"
        node = node[part]
    annotation = _child(annotation, last, node) if annotation is not None else None
    try:
        old, value = node.get(last), _override_value(annotation, text)
    except UserError as error:
        return f"--{key} {error}"
    turns_off = value is None and (annotation is None or _accepts(annotation, None))
    if isinstance(old, dict) and not isinstance(value, dict) and not turns_off:
        return f"--{key} {text}: {key} is the mapping {show(old)}; override it with a mapping or one of its keys"
    if isinstance(value, dict) and old is not None and not isinstance(old, dict):
        return f"--{key}: the mapping {show(value)} cannot replace {show(old)}{_kind(old)}"
    node[last] = value
    return None


# --- Validation -----------------------------------------------------------------------------------------


def _open_sections(section: type[Section], data: dict[str, Any]) -> None:
    """Fills required sections that are absent with {}, so that errors name the keys missing inside."""
    for key, field in _keys(section).items():
        inner = _sections(_slot(field), data.get(key))
        if key not in data and inner and field.is_required():
            data[key] = {}
        if len(inner) == 1 and isinstance(data.get(key), dict):
            _open_sections(inner[0], data[key])


def _locate(model_cls: type[Section], data: Any, loc: Sequence[str | int]) -> tuple[list[Any], Any, Any, Any]:
    """A pydantic location as `(path, parent type, type, value)`.

    Labels that pydantic adds for union members and tags are left out; the path ends at a union of plain
    types, since its members' errors are one fault to the user.
    """
    path, parent, annotation, node = [], None, model_cls, data
    for piece in loc:
        if len([m for m in _members(annotation) if m is not type(None)]) > 1 and not _sections(annotation):
            break
        child = _child(annotation, piece, node)
        in_dict = isinstance(node, dict) and (piece in node or any(piece in _keys(s) for s in _sections(annotation)))
        if not in_dict and not (isinstance(node, list) and isinstance(piece, int)):
            continue
        path, parent, annotation = [*path, piece], annotation, child
        node = node.get(piece, ABSENT) if in_dict else node[piece] if piece < len(node) else ABSENT
    return path, parent, annotation, node


def dotted(path: Sequence[str | int]) -> str:
    """`["a", "b", 0] -> "a.b[0]"`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def _unknown(model_cls: type[Section], path: Sequence[Any], parent: Any) -> str:
    allowed = list(dict.fromkeys(k for s in _sections(parent) for k in _keys(s)))
    hint = nearest_names(str(path[-1]), allowed)
    elsewhere = [row.key for row in describe(model_cls) if row.key.split(".")[-1] == path[-1]]
    if not hint and elsewhere:
        hint = f" (did you mean {elsewhere[0]!r}?)"
    return f"is not a known key{hint}; known here: {', '.join(allowed)}"


def _wrong_value(annotation: Any, value: Any) -> str:
    choices = [c for m in _members(annotation) if typing.get_origin(_unwrap(m)[0]) is Literal
               for c in typing.get_args(_unwrap(m)[0])]  # fmt: skip
    hint = nearest_names(value, map(str, choices)) if isinstance(value, str) else ""
    if value is None and _sections(annotation):
        hint = " (write {} for the defaults, or delete the key)"
    if isinstance(value, float) and value.is_integer() and "int" in type_text(annotation):
        hint = f" (write {int(value)})"
    return f"{_must_be(annotation)}, got {show(value)}{_kind(value)}{hint}"


def _faults(model_cls: type[Section], data: Any, error: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One pydantic error as `(dotted key, what is wrong)` pairs."""
    path, parent, annotation, value = _locate(model_cls, data, error["loc"])
    key, kind = dotted(path), error["type"]
    if kind == "field_faults":
        return [(dotted([*path, field]), what) for field, what in error["ctx"]["faults"]]
    if kind == "extra_forbidden":
        return [(key, _unknown(model_cls, path, parent))]
    if kind == "missing":
        return [(key, f"is required: {type_text(annotation)}")]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        targets = _targets(_sections(annotation))
        target = value.get(TARGET, ABSENT)
        seen = "is required" if target is ABSENT else f"is {show(target)}{nearest_names(str(target), targets)}"
        return [(f"{key}.{TARGET}", f"{seen}; allowed: {', '.join(targets)}")]
    if kind in ("value_error", "assertion_error"):
        return [(key, error["msg"])]
    return [(key, _wrong_value(annotation, value))]


def _within(key: str, above: str) -> bool:
    return key.startswith(above) and key[len(above) :][:1] in ("", ".", "[")


def validate(model_cls: type[S], data: dict[str, Any], source: str, overridden: Sequence[str] = (),
             faults: Sequence[str] = ()) -> S:  # fmt: skip
    """Validates plain YAML data. Raises one UserError that lists `faults` and every fault of the data.

    `source` heads the message; faults at keys in `overridden` are marked as from the command line.
    """
    faults, data = list(faults), copy.deepcopy(data)
    _open_sections(model_cls, data)
    instance = None
    try:
        # JSON is pydantic's strict mode for files: lists may fill tuples, text may fill paths, no more.
        instance = model_cls.model_validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        pairs = [pair for e in error.errors(include_url=False) for pair in _faults(model_cls, data, e)]
        for key, what in dict.fromkeys(pairs):
            given = any(_within(key, o) or _within(o, key) for o in overridden)
            faults.append(f"{key} {what}" + (" (command line)" if given else ""))
    raise_faults(f"{source}: {len(faults)} fault{'s' * (len(faults) != 1)} in the configuration", faults)
    return instance


def load_config(model_cls: type[S], path: str | Path, overrides: Sequence[str] = ()) -> S:
    """Reads a YAML file, applies `--a.b value` / `--a.b=value` overrides, validates.

    An override's value is YAML (`true`, `1e-3`, `[1, 2]`, `{a: 1}`, `null`), read as text where the field
    takes text; it may create sections that the file lacks. Explicit 0, false, [] and null are kept.
    Raises one UserError naming the file, and for each fault the full dotted key, the value and what is allowed.
    """
    data = read_yaml(path)
    pairs, faults = parse_overrides(overrides)
    conflicts = [_apply_override(model_cls, data, key, text) for key, text in pairs]
    faults += [c for c in conflicts if c is not None]
    return validate(model_cls, data, str(path), [key for key, _ in pairs], faults)


# --- Writing and describing -----------------------------------------------------------------------------


def to_yaml(instance: Section) -> str:
    """The resolved configuration as YAML; `load_config` of it gives an equal object."""
    data = instance.model_dump(mode="json", by_alias=True)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def save_config(instance: Section, path: str | Path) -> None:
    """Writes `to_yaml(instance)` atomically."""
    with atomic_file(path) as part:
        part.write_text(to_yaml(instance), encoding="utf-8")


class Row(NamedTuple):
    """One key of a configuration in words."""

    key: str
    type: str
    default: str
    doc: str


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = pydantic.TypeAdapter(Any).dump_python(field.get_default(call_default_factory=True), mode="json")
    return default if isinstance(default, str) and default else show(default)


def describe(model_cls: type[Section], prefix: str = "") -> list[Row]:
    """Every key below `model_cls`, in order: dotted key, type, default, meaning.

    A section that may be null has a row of its own. Keys of sections chosen by `_target_` are listed once.
    """
    rows: list[Row] = []
    for name, field in _keys(model_cls).items():
        key, sections = prefix + name, _sections(_slot(field))
        if not sections or type(None) in _members(_slot(field)):
            rows.append(Row(key, type_text(_slot(field)), _default_text(field), field.description or ""))
        if len(_targets(sections)) > 1:
            said = "one of " + ", ".join(_targets(sections))
            rows.append(Row(f"{key}.{TARGET}", said, "required", field.description or ""))
        rows += [row for section in sections for row in describe(section, key + ".")]
    return list({row.key: row for row in reversed(rows)}.values())[::-1]


def help_text(model_cls: type[Section], *, color: bool = False, width: int = 100) -> str:
    """Every key with type, default and meaning, `width` columns wide; ANSI colours when asked for."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    out = io.StringIO()
    # Everything is explicit here, so that the environment (NO_COLOR, COLUMNS, TERM) changes nothing.
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False,
                      color_system="standard" if color else None, legacy_windows=False)  # fmt: skip
    groups: dict[str, list[Row]] = {}
    for row in describe(model_cls):
        groups.setdefault(row.key.rpartition(".")[0], []).append(row)
    for section, rows in groups.items():
        console.print(Text(section, style="bold underline"))
        for row in rows:
            default = "required" if row.default == "required" else f"default {row.default}"
            line = Text.assemble((row.key, "bold cyan"), f"  {row.type}; ", (default, "green"))
            console.print(Padding(line, (0, 0, 0, 2)))
            console.print(Padding(Text(row.doc), (0, 0, 0, 6)))
        console.print()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
