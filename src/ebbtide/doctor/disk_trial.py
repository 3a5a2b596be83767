"""A program that looks at folders and measures them; `ebbtide doctor` starts it, as it may hang.

    python -m ebbtide.doctor.disk_trial look FOLDER
    python -m ebbtide.doctor.disk_trial measure FOLDER...

It writes one JSON object a line. What it writes to the disk is in files without a name, which go
with the process however that ends.
"""

import json
import shutil
import sys
from collections.abc import Sequence

from ebbtide.errors import MemoryTierError
from ebbtide.memory.disk_file import DiskFile
from ebbtide.memory.disk_rates import NUM_BYTES, measure_rates
from ebbtide.memory.file_calls import SystemFileCalls
from ebbtide.memory.mounts import find_file_system
from ebbtide.units import DiskSpec


def main(arguments: Sequence[str]) -> None:
    """Look at a folder, or measure several at once."""
    what, *folders = arguments
    if what == "look":
        _look(folders[0])
    else:
        _measure(folders)


def _look(folder: str) -> None:
    # One line for each, as the next call may hang.
    _tell(file_system=find_file_system(folder))
    try:
        _tell(free_bytes=shutil.disk_usage(folder).free)
        file = DiskFile(folder, SystemFileCalls())
    except (MemoryTierError, OSError) as error:
        _tell(error=str(error))
        return
    try:
        _tell(is_direct=file.is_direct)
    finally:
        file.close()


def _measure(folders: Sequence[str]) -> None:
    specs = [DiskSpec(path=folder, cap_bytes=NUM_BYTES) for folder in folders]
    try:
        rates = measure_rates(specs)
    except (MemoryTierError, OSError) as error:
        _tell(error=str(error))
        return
    for folder, rate in zip(folders, rates, strict=True):
        _tell(
            folder=folder,
            write_bytes_per_s=rate.write_bytes_per_s,
            read_bytes_per_s=rate.read_bytes_per_s,
        )


def _tell(**record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
