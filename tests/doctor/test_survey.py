"""What is found out about a machine, with programs that a test answers for."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import ebbtide
from ebbtide.doctor.facts import Disk
from ebbtide.doctor.programs import Deadline, Told
from ebbtide.doctor.survey import DISK_TRIAL, GPUS_S, LINK_SURVEY, SMI_S, TOTAL_S, survey
from tests.doctor.machines import ADDRESS, FAST, LINK, write_host, write_pci

OTHER = "0000:65:00.0"
UUID = "0f1e2d3c-0000-1111-2222-333344445555"
TORCH: dict[str, object] = {"torch": "2.13.0+cu130", "build": "CUDA 13.0", "num_gpus": 2}


def described(index: int, address: str) -> dict[str, object]:
    return {
        "gpu": index,
        "name": "NVIDIA H200",
        "uuid": UUID,
        "pci_address": address,
        "device_bytes": 150_000_000_000,
        "free_bytes": 149_000_000_000,
    }


def alone(index: int) -> dict[str, object]:
    return {"gpu": index, "alone": asdict(FAST), "link": asdict(LINK)}


class Programs:
    """Answers for programs, and notes what was run and for how long it might."""

    def __init__(self, **answers: Told) -> None:
        self.answers = answers
        self.seconds: dict[str, float] = {}

    def run(self, command: Sequence[str], seconds: float) -> Told:
        name = next(
            name
            for name, word in {
                "gpus": LINK_SURVEY,
                "c2c": "c2c",
                "nvlink": "nvlink",
                "look": "look",
                "measure": "measure",
            }.items()
            if word in command
        )
        self.seconds[name] = seconds
        return self.answers.get(name, Told(text="", error="it could not be started"))


def lines(*records: dict[str, object], error: str = "") -> Told:
    return Told(text="\n".join(map(json.dumps, records)), error=error)


def version_of(package: str) -> str | None:
    return "2.13.0+cu130" if package == "torch" else None


def test_gpus_are_joined_with_what_the_system_shows_of_them(tmp_path: Path) -> None:
    write_host(tmp_path)
    write_pci(tmp_path, ADDRESS, speed="2.5 GT/s PCIe", node=1)
    write_pci(tmp_path, OTHER)
    programs = Programs(
        gpus=lines(TORCH, described(0, ADDRESS), alone(0)),
        c2c=Told(text=""),
        nvlink=Told(text=f"GPU 0: NVIDIA H200 (UUID: GPU-{UUID})\n\t Link 0: 26.5 GB/s\n"),
    )
    facts = survey(root=tmp_path, environ={}, find_version=version_of, run=programs.run)
    assert [shown.address for shown in facts.pci_gpus] == [ADDRESS, OTHER]
    (gpu,) = facts.gpus
    assert gpu.pci is not None
    assert (gpu.pci.numa_node, gpu.pci.link) == (1, LINK)  # as while copies ran
    assert gpu.alone == gpu.together == FAST
    assert (gpu.c2c_bytes_per_s, gpu.nvlink_bytes_per_s) == (None, 26_500_000_000)
    assert facts.software.torch_build == "CUDA 13.0"
    assert facts.software.versions["torch"] == "2.13.0+cu130"
    assert "jax" not in facts.software.versions
    assert facts.unknown == ()


def test_what_was_measured_before_a_driver_hung_is_kept_and_the_rest_is_named(
    tmp_path: Path,
) -> None:
    write_host(tmp_path)
    write_pci(tmp_path, ADDRESS)
    hung = "it did not end within 34 s"
    programs = Programs(
        gpus=lines(TORCH, described(0, ADDRESS), described(1, OTHER), alone(0), error=hung)
    )
    facts = survey(root=tmp_path, environ={}, find_version=version_of, run=programs.run)
    assert [gpu.alone for gpu in facts.gpus] == [FAST, None]
    assert [gpu.together for gpu in facts.gpus] == [None, None]
    assert facts.unknown == (
        f"GPUs and their links, in full: the program that measures: {hung}",
        "the link of GPU 0 while all GPUs copy",
        "the link of GPU 1",
        "c2c links: nvidia-smi c2c -s: it could not be started",
        "nvlink links: nvidia-smi nvlink -s: it could not be started",
    )


def test_a_gpu_without_chip_to_chip_links_is_no_riddle(tmp_path: Path) -> None:
    """As one H200 answered."""
    write_host(tmp_path)
    write_pci(tmp_path, ADDRESS)
    programs = Programs(
        gpus=lines(TORCH, described(0, ADDRESS), alone(0)),
        c2c=Told(text="", error="it ended with 3: no message", status=3),
        nvlink=Told(text="", error="it ended with 9: no driver", status=9),
    )
    facts = survey(root=tmp_path, environ={}, find_version=version_of, run=programs.run)
    assert [gpu.c2c_bytes_per_s for gpu in facts.gpus] == [None]
    assert facts.unknown == ("nvlink links: nvidia-smi nvlink -s: it ended with 9: no driver",)


def test_without_torch_and_without_a_system_it_says_what_it_could_not(tmp_path: Path) -> None:
    programs = Programs()
    facts = survey(root=tmp_path, environ={}, find_version=lambda _: None, run=programs.run)
    assert (facts.gpus, facts.pci_gpus, programs.seconds) == ((), (), {})
    assert facts.unknown == (
        "/sys/bus/pci is not there: how GPUs are linked, and to which NUMA node",
        "torch is not installed: GPUs and their links were not measured",
        "neither /proc/meminfo nor a control group says how much memory is free",
        "whether the system has transparent huge pages",
    )


def test_disks_that_cannot_be_used_are_not_measured_with_the_others(tmp_path: Path) -> None:
    programs = Programs(
        look=lines({"file_system": "ext4"}, {"free_bytes": 9}, {"is_direct": True}),
        measure=lines({"folder": "/a", "write_bytes_per_s": 3, "read_bytes_per_s": 4}),
    )
    facts = survey(
        [Disk(path="/a", cap_bytes=5)],
        root=tmp_path, environ={}, find_version=lambda _: None, run=programs.run,
    )  # fmt: skip
    assert facts.disks == (
        Disk(path="/a", file_system="ext4", free_bytes=9, cap_bytes=5, is_direct=True,
             write_bytes_per_s=3, read_bytes_per_s=4),
    )  # fmt: skip
    hung = Programs(look=lines({"file_system": "nfs4"}, error="it did not end within 4 s"))
    facts = survey(
        [Disk(path="/b")], root=tmp_path, environ={}, find_version=lambda _: None, run=hung.run
    )
    assert facts.disks == (Disk(path="/b", file_system="nfs4", error="it did not end within 4 s"),)
    assert "measure" not in hung.seconds


def test_each_part_has_a_share_and_all_of_them_less_than_a_minute(tmp_path: Path) -> None:
    write_pci(tmp_path, ADDRESS)
    now = [0.0]
    programs = Programs(gpus=lines(TORCH, described(0, ADDRESS), alone(0)))

    def run_to_the_end(command: Sequence[str], seconds: float) -> Told:
        now[0] += seconds
        return programs.run(command, seconds)

    survey(
        [Disk(path=f"/{number}") for number in range(9)],
        root=tmp_path,
        environ={},
        find_version=version_of,
        run=run_to_the_end,
        deadline=Deadline(TOTAL_S, clock=lambda: now[0]),
    )
    assert (programs.seconds["gpus"], programs.seconds["c2c"]) == (GPUS_S, SMI_S)
    assert programs.seconds["look"] == 0  # of the last folder
    assert now[0] == TOTAL_S < 60


def test_the_variables_that_matter_are_told(tmp_path: Path) -> None:
    environ = {"PYTORCH_ALLOC_CONF": "backend:native", "HOME": "/home/x", "XLA_FLAGS": "--a=1"}
    facts = survey(root=tmp_path, environ=environ, find_version=lambda _: None, run=Programs().run)
    assert facts.software.variables == {
        "PYTORCH_ALLOC_CONF": "backend:native",
        "XLA_FLAGS": "--a=1",
    }


def test_the_programs_are_there() -> None:
    root = Path(ebbtide.__file__).parents[1]
    for module in (LINK_SURVEY, DISK_TRIAL):
        assert (root / f"{module.replace('.', '/')}.py").is_file()
