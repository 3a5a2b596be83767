"""What nvidia-smi prints of links."""

from ebbtide.doctor.nvidia_smi import read_speeds

C2C = """\
GPU 0: NVIDIA GH200 480GB (UUID: GPU-0f1e2d3c-0000-1111-2222-333344445555)
\t C2C Link 0: 44.712 GB/s
\t C2C Link 1: 44.712 GB/s
GPU 1: NVIDIA GH200 480GB (UUID: GPU-aaaa0000-0000-1111-2222-333344445555)
\t C2C Link 0: 44.712 GB/s
"""
NVLINK = """\
GPU 0: NVIDIA H200 (UUID: GPU-0f1e2d3c-0000-1111-2222-333344445555)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
\t Link 2: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-aaaa0000-0000-1111-2222-333344445555)
\t Link 0: <inactive>
"""


def test_the_links_of_a_gpu_are_added_up() -> None:
    assert read_speeds(C2C) == {
        "0f1e2d3c-0000-1111-2222-333344445555": 89_424_000_000,
        "aaaa0000-0000-1111-2222-333344445555": 44_712_000_000,
    }


def test_links_that_are_not_active_do_not_count() -> None:
    assert read_speeds(NVLINK) == {"0f1e2d3c-0000-1111-2222-333344445555": 53_124_000_000}


def test_what_has_another_form_is_nothing() -> None:
    assert read_speeds("No devices were found\n") == {}
    assert read_speeds("\t Link 0: 26.562 GB/s\n") == {}
