"""Whether a folder is a place for files that nobody else should reach.

A file of the disk tier has no name, and only its owner may open it. What is left to check is the
way to it: whoever can put another folder in place of one on it decides where activations go.
"""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ebbtide.errors import MemoryTierError

log = logging.getLogger("ebbtide")

StatusOf = Callable[[str], os.stat_result]

_MOST_LINKS = 40
"""As many as Linux itself follows."""


def check_folder(
    folder: Path, *, status_of: StatusOf = os.lstat, read_link: Callable[[str], str] = os.readlink
) -> None:
    """Refuse a folder that is none, or that a link of another user leads to.

    Symbolic links are followed where root or this user made them. A folder on the way, or the
    last one, that is open to everybody's writing is warned of, unless its sticky bit keeps them
    from what is not theirs, as in /tmp. It is used: scratch volumes of containers, of one user
    each, are often such folders, and the file in it has no name that somebody could take.

    Args:
        folder: As the user named it.
        status_of: Tells of one place without following a link; another one is for tests.
        read_link: Tells where a link leads.

    Raises:
        MemoryTierError: The folder does not exist, is not a folder or cannot be looked at; its name
            has `..` or a NUL; or a link on the way is another user's.
    """
    place = f"disk folder {str(folder)!r}"
    if "\0" in str(folder):
        raise MemoryTierError(f"{place} has a NUL in its name, as no folder has. Name another one.")
    if ".." in folder.parts:
        raise MemoryTierError(
            f"{place} has '..' in it, and where that leads depends on links. Name the folder "
            f"without, for example {os.path.realpath(folder)!r}."
        )
    try:
        found = _walk(folder, place, status_of, read_link)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MemoryTierError(
            f"{place} does not exist; ebbtide makes a file in it, but never the folder. "
            "Create it, or name another one."
        ) from error
    except (OSError, UnicodeEncodeError) as error:
        raise MemoryTierError(
            f"{place} cannot be looked at ({error}). Name another one."
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise MemoryTierError(
            f"{place} is not a folder; ebbtide makes a file of its own in a folder. "
            f"Name a folder, for example {str(folder.parent)!r}."
        )


def _walk(
    folder: Path, place: str, status_of: StatusOf, read_link: Callable[[str], str]
) -> os.stat_result:
    """Return the status of the last place on the way, having looked at each."""
    at = "/"
    found = status_of(at)
    waiting = _names(os.path.join(os.getcwd(), folder))
    num_links = 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            # Only of links: these were made by somebody whom we trust.
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, name)
        found = status_of(here)
        if not stat.S_ISLNK(found.st_mode):
            at = here
            _warn_of_open_to_all(found, here, place)
            continue
        if found.st_uid not in (0, os.geteuid()):
            raise MemoryTierError(
                f"{place}: {here!r} is a symbolic link that user {found.st_uid} made, and so can "
                "lead elsewhere at any time. Name the folder that you mean, for example "
                f"{os.path.realpath(folder)!r}."
            )
        num_links += 1
        if num_links > _MOST_LINKS:
            raise MemoryTierError(f"{place} leads from link to link for ever. Name another one.")
        target = read_link(here)
        if os.path.isabs(target):
            at = "/"
        waiting += _names(target)
        found = status_of(at)
    return found


def _names(path: str) -> list[str]:
    """Return the parts of a path, the first one last."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _warn_of_open_to_all(found: os.stat_result, here: str, place: str) -> None:
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if stat.S_ISDIR(found.st_mode) and is_open:
        log.warning(
            "%s: everybody may write to %r and replace what is in it, since its sticky bit is not "
            "set. Where others use this machine, set it (chmod +t %s), or name a folder that is "
            "yours.",
            place,
            here,
            here,
        )
