"""Typed YAML configs: one loader for every service, run and preset.

A config type is a frozen `msgspec.Struct` whose fields carry ranges (`msgspec.Meta`) and are documented in its
docstring. `load` reports everything that is wrong at once: unknown keys with their nearest match, wrong types, values
out of range, missing keys, each under the dotted name that an override on the command line would use.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from turnwire.errors import ConfigError, Problem

T = TypeVar("T")


def nearest(name: str, allowed: Sequence[str]) -> str:
    """What to say after "unknown X": the nearest match, if there is one, and what is allowed."""
    match = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    hint = f"did you mean {match[0]!r}? " if match else ""
    return f"{hint}Allowed: {', '.join(sorted(allowed)) or 'nothing'}"


_MOST_DIGITS = 40
_MOST_VALUES = 100_000
"""Of a document, with what its aliases repeat: a few lines of them can stand for more than fits anywhere."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values (1e-5 is a number; `no`, 1:30 and 2026-01-31 are strings), and no key twice."""


_TAG = "tag:yaml.org,2002:"
_CHANGED = {_TAG + name for name in ("int", "float", "bool", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _CHANGED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _TAG + "int", re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf)$|^\.(?:nan|NaN)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(_TAG + "bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """010 is ten: only 0o and 0x change the base."""
    text = loader.construct_scalar(node)
    if len(text) > _MOST_DIGITS:  # of thousands, Python itself refuses to read some and to show others
        problem = "the number is too long; put it in quotes if it is none"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_Loader.add_constructor(_TAG + "int", _integer)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"keys are strings, not {key!r}", key_node.start_mark)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", key_node.start_mark)
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(_TAG + "map", _unique_mapping)


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would not read as a string."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def parse_yaml(text: str, source: str = "config") -> Any:
    """Parse YAML text to plain values. Raises ConfigError with the line where it is not YAML."""
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        size = _size(value, {})
    except RecursionError as error:
        raise ConfigError([Problem("", "is nested too deeply")], source) from error
    except yaml.YAMLError as error:
        raise ConfigError([Problem("", str(error).replace("<unicode string>", source))], source) from error
    if size > _MOST_VALUES:
        raise ConfigError([Problem("", f"holds more than {_MOST_VALUES} values, with its aliases")], source)
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """How many values this one holds, counting what aliases repeat."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(item, known) for item in items)
    return known[id(value)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file that holds one mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}")], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"is not UTF-8: {error}")], str(path)) from error
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds {_show(value)}"
        raise ConfigError([Problem("", f"{what}; it must hold `key: value` lines")], str(path))
    return value


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set `a.b.c=value` on a copy. Values are YAML; list items are named by position (`data.train.0.size=10`)."""
    result: dict[str, Any] = msgspec.to_builtins(values)
    problems = []
    for override in overrides:
        key, separator, text = override.partition("=")
        path = key.split(".")
        if not separator or not all(path):
            problems.append(Problem(override, "an override is written key=value, with a key as a.b.c"))
            continue
        try:
            _set(result, path, parse_yaml(text, f"the value of {key}"))
        except ConfigError as error:
            problems += [Problem(key, problem.message) for problem in error.problems]
        except LookupError as error:
            problems.append(Problem(key, f"there is no such place: {error.args[0]}"))
    if problems:
        raise ConfigError(problems, "command line")
    return result


def _set(container: Any, path: list[str], value: Any) -> None:
    """Raises LookupError that says which part of the path is not there."""
    for number, part in enumerate(path):
        here = ".".join(path[:number])
        if isinstance(container, list):
            if not part.isdecimal() or int(part) >= len(container):
                raise LookupError(f"{here} is a list of {len(container)}, named by position from 0; not {part!r}")
            place: Any = int(part)
        elif isinstance(container, dict):
            place = part
        else:
            raise LookupError(f"{here} is the plain value {_show(container)}")  # noqa: TRY004 - about the path
        if number == len(path) - 1:
            container[place] = value
        elif isinstance(container, dict) and container.get(place) is None:
            container[place] = {}
        container = container[place]


def convert(value: Any, kind: type[T], source: str = "config", prefix: str = "") -> T:
    """Plain values to a config type. Raises ConfigError with every problem."""
    problems: list[Problem] = []
    result = _convert(value, kind, prefix, problems)
    if problems:
        raise ConfigError(problems, source)
    return typing.cast(T, result)


def load(path: Path, kind: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a YAML file, apply overrides, convert."""
    return convert(apply_overrides(read_yaml(path), overrides), kind, str(path))


def dump(config: Any) -> str:
    """A config as YAML that `load` reads back to the same."""
    return yaml.dump(msgspec.to_builtins(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _join(prefix: str, key: str | int) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def _convert(value: Any, kind: Any, key: str, problems: list[Problem]) -> Any:  # noqa: PLR0911 - one a form of type
    bare = _without_annotations(kind)
    origin, arguments = typing.get_origin(bare), typing.get_args(bare)
    if origin in (typing.Union, types.UnionType):
        structs = [item for item in arguments if _is_struct(item) or _is_container_of_struct(item)]
        if len(structs) == 1 and not (value is None and type(None) in arguments):
            return _convert(value, structs[0], key, problems)
    if _is_struct(bare):
        return _convert_struct(value, bare, key, problems)
    if _is_container_of_struct(bare):
        if origin is dict and isinstance(value, Mapping):
            return {name: _convert(item, arguments[1], _join(key, name), problems) for name, item in value.items()}
        if origin in (list, tuple) and isinstance(value, list):
            items = [_convert(item, arguments[0], _join(key, i), problems) for i, item in enumerate(value)]
            _check_length(value, kind, key, problems)
            return tuple(items) if origin is tuple else items
    choices = _choices(bare)
    if choices and value not in choices:
        names = [str(choice) for choice in choices]
        problems.append(Problem(key, f"{_show(value)} is not one of its values; {nearest(str(value), names)}"))
        return None
    endless = [Problem(place, f"must be a finite number, not {_show(item)}") for place, item in _endless(value, key)]
    if endless:
        problems += endless
        return None
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        problems.append(_problem_of(error, key, value))
        return None


def _endless(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Infinities and what is not a number, each with its place: no setting means them, and JSON does not have them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _endless(item, _join(key, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _endless(item, _join(key, number))


def _check_length(value: list[Any], kind: Any, key: str, problems: list[Problem]) -> None:
    """Of a list whose items are converted one by one."""
    if typing.get_origin(kind) is not typing.Annotated:
        return
    limits = typing.get_args(kind)[1:]
    try:
        msgspec.convert([None] * len(value), typing.Annotated[list[None], *limits])
    except msgspec.ValidationError as error:
        problems.append(_problem_of(error, key, value))


def _convert_struct(value: Any, kind: type[msgspec.Struct], key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(Problem(key, f"expected `key: value` lines, got {_show(value)}"))
        return None
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    before = len(problems)
    for name in value:
        if name not in fields:
            problems.append(Problem(_join(key, name), f"unknown key; {nearest(str(name), list(fields))}"))
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[field.name] = _convert(value[name], hints[field.name], _join(key, name), problems)
        elif field.required:
            problems.append(Problem(_join(key, name), "missing"))
    if len(problems) > before:
        return None
    try:
        return kind(**arguments)
    except ValueError as error:  # a check across fields, from the type's __post_init__
        problems.append(Problem(key, str(error)))
        return None


def _problem_of(error: msgspec.ValidationError, key: str, value: Any) -> Problem:
    """msgspec's message under our key, with the value itself instead of its type."""
    text, _, inner = str(error).partition(" - at `$")
    text = text.partition(", got ")[0]
    path = [part for part in inner.rstrip("`").replace("[", ".").replace("]", "").split(".") if part]
    for part in path:
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:  # msgspec names a place that is no key, as any value of a mapping
            return Problem(".".join([key, *path]), f"{text[:1].lower()}{text[1:]}")
    return Problem(".".join([key, *path]), f"{text[:1].lower()}{text[1:]}, got {_show(value)}")


def _show(value: Any) -> str:
    """As YAML writes it, where that is short."""
    text = _PLAIN.get(value, "") if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_PLAIN = {None: "null", True: "true", False: "false"}


def _without_annotations(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _choices(kind: Any) -> tuple[Any, ...]:
    """The allowed values of a Literal (or an optional one); nothing for other types."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if all(option is type(None) or typing.get_origin(option) is typing.Literal for option in options):
            return tuple(None if o is type(None) else c for o in options for c in (typing.get_args(o) or (None,)))
    return ()


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_container_of_struct(kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    item = (
        arguments[-1]
        if origin is dict and arguments
        else arguments[0]
        if origin in (list, tuple) and arguments
        else None
    )
    return item is not None and (_is_struct(_without_annotations(item)) or _is_container_of_struct(item))
