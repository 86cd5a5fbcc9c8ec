"""From JSON values to the fields of a protobuf message, or an error that says what was expected.

Knows the field types that the public messages use. Stricter than protobuf's own JSON: names are those of the
.proto file, numbers are numbers, and every error names the field, its value and the limit.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_QUOTED_CHARACTERS = 60
_BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
_MAX_EXACT_FLOAT = 2**53

Field = Any  # a FieldDescriptor: of two classes, as the stubs have it


class FieldRefused(ValueError):
    """A field cannot be what it is; the message begins with its name."""

    def __init__(self, field: str, problem: str) -> None:
        """`problem` is the rest of the sentence."""
        super().__init__(f"{field} {problem}")
        self.field = field


def refuse_value(field: str, value: object, expected: str) -> NoReturn:
    """Raise FieldRefused, quoting the value."""
    raise FieldRefused(field, f"is {quoted(value)}; it must be {expected}")


def refuse_name(name: str, known: Iterable[str], where: str = "") -> NoReturn:
    """Raise FieldRefused for a name that is not known, with the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
    raise FieldRefused(where + name, f"is not known; {hint}")


def quoted(value: object) -> str:
    """The value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[: MAX_QUOTED_CHARACTERS - 3] + "..."


def fill(message: Message, values: object, path: str) -> None:
    """Set the fields that an object names; null is absent. Raises FieldRefused; the object is at `path`."""
    if not isinstance(values, Mapping):
        refuse_value(path, values, "an object")
    for name, value in values.items():
        if name not in message.DESCRIPTOR.fields_by_name:
            refuse_name(name, message.DESCRIPTOR.fields_by_name, f"{path}.")
        if value is not None:
            put(message, name, value, f"{path}.{name}")


def put(message: Message, name: str, value: object, path: str) -> None:
    """Set one field, which must exist. Raises FieldRefused, which calls it `path`."""
    field: Field = message.DESCRIPTOR.fields_by_name[name]
    message.SetInParent()  # an empty list is not an absent message
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _put_map(message, field, value, path)
    elif field.is_repeated:
        if not isinstance(value, list):
            refuse_value(path, value, "a list")
        items = getattr(message, name)
        for i, item in enumerate(value):
            if field.message_type is None:
                items.append(_scalar(field, item, f"{path}[{i}]"))
            else:
                fill(items.add(), item, f"{path}[{i}]")
    elif field.message_type is not None:
        getattr(message, name).SetInParent()
        fill(getattr(message, name), value, path)
    else:
        setattr(message, name, _scalar(field, value, path))


def number_at(path: str, value: object) -> float:
    """A JSON number; raises FieldRefused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse_value(path, value, "a number")
    try:
        return float(value)
    except OverflowError:
        refuse_value(path, value, "a number below 1.8e308")


def _put_map(message: Message, field: Field, value: object, path: str) -> None:
    if not isinstance(value, Mapping):
        refuse_value(path, value, "an object")
    key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for key, item in value.items():
        if not key.isdecimal() or len(key) > 20:  # JSON's names are strings
            refuse_value(f"{path}'s name", key, "a whole number in quotes")
        number = _integer(key_field, int(key), f"{path}'s name")
        getattr(message, field.name)[number] = _scalar(value_field, item, f"{path}[{key}]")


def _scalar(field: Field, value: object, path: str) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return _string(value, path)
        case FieldDescriptor.TYPE_BOOL:
            if not isinstance(value, bool):
                refuse_value(path, value, "true or false")
            return value
        case FieldDescriptor.TYPE_DOUBLE:
            return number_at(path, value)
    return _integer(field, value, path)


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        refuse_value(path, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FieldRefused(path, f"has half a surrogate pair at character {error.start + 1}") from None
    return value


def _integer(field: Field, value: object, path: str) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse_value(path, value, "a whole number")
    highest = 2 ** _BITS[field.type] - 1
    if not 0 <= value <= highest:
        raise FieldRefused(path, f"is {quoted(value)}; it must lie in 0..{highest}")
    return value
