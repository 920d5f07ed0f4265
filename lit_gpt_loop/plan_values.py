"""What a configuration may hold: names and types as the constructors have them, read from their source (layer P)."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lit_gpt_loop.signatures import accepts, constructor_arguments, constructor_defaults, constructor_types


def known_fields(values: Any, names: Collection[str], where: str) -> dict[str, Any]:
    """Return the fields of a section.

    Raises:
        ValueError: it is no mapping, or has a field that `names` does not list.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{where} is {values!r}: it must hold fields, such as {', '.join(sorted(names)[:3])}"
        )
    for word in values:
        if word not in names:
            close = difflib.get_close_matches(str(word), names, n=2)
            meant = f"; did you mean {' or '.join(close)}?" if close else "."
            raise ValueError(f"{where} has no field {word}{meant} It takes {', '.join(sorted(names))}")
    return dict(values)


def constructor_values(given: Any, path: Path, class_name: str, where: str) -> dict[str, Any]:
    """Return the arguments of a class' constructor, defaults included.

    Raises:
        ValueError: one that it does not take, or a value of another type than annotated.
    """
    values = typed_fields(
        known_fields(given, constructor_arguments(path, class_name), where),
        constructor_types(path, class_name),
        where,
    )
    return constructor_defaults(path, class_name) | values


def typed_fields(values: Mapping[str, Any], types: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the values, a number where a text belongs as text (`--data.store 7`).

    Raises:
        ValueError: a value of another type than annotated.
    """
    result = dict(values)
    for name, value in values.items():
        annotation = types.get(name)
        if annotation is None or accepts(annotation, value):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not accepts(annotation, str(value)):
            shown = "null" if value is None else repr(value)
            raise ValueError(f"{where}.{name} {shown} must be of type {annotation}")
        result[name] = str(value)
    return result


def field_names(cls: type) -> list[str]:
    """Return the names of a dataclass' fields."""
    return [f.name for f in fields(cls)]


def field_types(cls: type) -> dict[str, str]:
    """Return field -> annotation of a dataclass, as `accepts` reads it."""
    return {f.name: f.type.__name__ if isinstance(f.type, type) else str(f.type) for f in fields(cls)}


def whole_number(values: Mapping[str, Any], name: str, where: str, least: int = 1) -> int | None:
    """Return a field that is a whole number, None where it is null.

    Raises:
        ValueError: it is anything else, or below `least`.
    """
    value = values.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{where}{name} {value!r} must be a whole number of at least {least}")
    return value
