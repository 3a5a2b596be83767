"""Read a file that somebody else may have made: no more of it than a good one has."""

from pathlib import Path

from ebbtide.units import format_bytes


def read_small_text(path: Path, most_bytes: int) -> str:
    """Return the text of a UTF-8 file, which may begin with a mark of its byte order.

    Args:
        path: May name a device that never ends, such as /dev/zero.
        most_bytes: More than a good file of its kind has; so much memory may be taken.

    Raises:
        OSError: The file cannot be read.
        UnicodeDecodeError: It is not UTF-8.
        ValueError: It has more bytes, or its name has a NUL.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(
            f"the file has more than {format_bytes(most_bytes)}, as no good one of its kind does"
        )
    return content.decode("utf-8-sig")
