"""The readers of JSON fields, shared by all forms: broken files are refused in the same words."""

import json
from collections.abc import Collection
from typing import cast

from ebbtide.errors import PlanError
from ebbtide.naming import shorten, unknown_name_message


def read_form(text: str, *, form: str, version: int) -> dict[str, object]:
    """Return the outermost record of a JSON file of ours.

    Args:
        text: The file's text.
        form: The value that its field `format` must have.
        version: The newest version that the caller reads; it reads all from 1 on.

    Raises:
        PlanError: The text is not JSON, names a field twice, or is another format or version.
    """
    try:
        value = cast(object, json.loads(text, object_pairs_hook=_refuse_repeated_fields))
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"the text is not JSON ({error}); {form!r} is a JSON form. "
            "Write the file again with to_json()."
        ) from error
    record = read_record(value, where="the file")
    given_form = record.get("format")
    if given_form != form:
        raise PlanError(
            f"the file's format is {_given(given_form)}; this reader takes {form!r} only. "
            "Pass a file of that format."
        )
    given_version = record.get("version")
    if type(given_version) is not int or not 1 <= given_version <= version:
        known = "version 1" if version == 1 else f"versions 1 to {version}"
        raise PlanError(
            f"the file's version is {_given(given_version)}; this ebbtide reads {known} of "
            f"{form!r} only. Write the file again with this ebbtide."
        )
    return record


def read_record(value: object, *, where: str) -> dict[str, object]:
    """Return `value` if it is a JSON object; `where` names it in the message otherwise."""
    if not isinstance(value, dict):
        raise PlanError(
            f"{where} is {_shown(value)}; it must be an object with named fields. "
            "See docs/formats.md."
        )
    return cast(dict[str, object], value)


def refuse_unknown_fields(record: dict[str, object], valid: Collection[str], *, where: str) -> None:
    """Raise PlanError if `record` has a field that no reader would honour."""
    for name in record:
        if name not in valid:
            message = unknown_name_message("field", name, tuple(sorted(valid)))
            raise PlanError(f"{where}: {message}")


def read_field(record: dict[str, object], name: str, *, where: str) -> object:
    """Return the field `name`, whatever its type."""
    if name not in record:
        raise PlanError(f"{where} has no field {name!r}; it is required. See docs/formats.md.")
    return record[name]


def read_text(record: dict[str, object], name: str, *, where: str) -> str:
    """Return the field `name`, which must be a text."""
    value = read_field(record, name, where=where)
    if not isinstance(value, str):
        raise PlanError(_type_message(name, value, "a text", where))
    return value


MOST_NUMBER = 2**63 - 1
"""What is above it, or below its negative, is no number of bytes or nanoseconds."""


def read_int(record: dict[str, object], name: str, *, where: str) -> int:
    """Return the field `name`, which must be a whole number that 64 bits can hold."""
    value = read_field(record, name, where=where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(_type_message(name, value, "a whole number", where))
    if abs(value) > MOST_NUMBER:
        raise PlanError(_type_message(name, value, f"at most {MOST_NUMBER} (64 bits)", where))
    return value


def read_flag(record: dict[str, object], name: str, *, where: str) -> bool:
    """Return the field `name`, which must be true or false."""
    value = read_field(record, name, where=where)
    if not isinstance(value, bool):
        raise PlanError(_type_message(name, value, "true or false", where))
    return value


def read_list(record: dict[str, object], name: str, *, where: str) -> list[object]:
    """Return the field `name`, which must be a list."""
    value = read_field(record, name, where=where)
    if not isinstance(value, list):
        raise PlanError(_type_message(name, value, "a list", where))
    return cast(list[object], value)


def read_names(record: dict[str, object], name: str, where: str) -> tuple[str, ...]:
    """Return the field `name`, which must be a list of texts."""
    names = read_list(record, name, where=where)
    for item in names:
        if not isinstance(item, str):
            raise PlanError(_type_message(name, item, "a list of texts", where))
    return tuple(str(item) for item in names)


def refuse_negative(number: int, owner: str, name: str) -> None:
    """Raise PlanError if a time or a number of bytes is negative."""
    if number < 0:
        raise PlanError(
            f"{owner} has {name} {number}; times and sizes are 0 or more. Measure it again."
        )


def _type_message(name: str, value: object, wanted: str, where: str) -> str:
    return f"{where}: {name} is {_shown(value)}; it must be {wanted}. See docs/formats.md."


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        # It was read, but from fewer calls.
        text = "nested too deep to be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def _given(value: object) -> str:
    if isinstance(value, str):
        return repr(shorten(value))
    return _shown(value) if isinstance(value, dict | list) else shorten(repr(value))


def _refuse_repeated_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json keeps the last of two fields with one name: a plan edited by hand would lose a line.
    record: dict[str, object] = {}
    for name, value in pairs:
        if name in record:
            raise ValueError(f"field {shorten(name)!r} is there twice")
        record[name] = value
    return record
