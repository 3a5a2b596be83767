"""What `ebbtide doctor` measures of the GPUs that are here."""

import time

import torch

from ebbtide.doctor import find, make_machine, survey
from ebbtide.doctor.machine import Refusal
from tests.gpu.test_probe import FASTEST_BYTES_PER_S, SLOWEST_BYTES_PER_S


def test_every_gpu_has_its_rates_alone_and_together_in_under_a_minute() -> None:
    start_s = time.monotonic()
    facts = survey()
    assert time.monotonic() - start_s < 60
    assert [gpu.index for gpu in facts.gpus] == list(range(torch.cuda.device_count()))
    for gpu in facts.gpus:
        assert gpu.name == torch.cuda.get_device_name(gpu.index)
        for rates in (gpu.alone, gpu.together):
            assert rates is not None
            for rate in (rates.out_bytes_per_s, rates.in_bytes_per_s, rates.both_bytes_per_s):
                assert SLOWEST_BYTES_PER_S < rate < FASTEST_BYTES_PER_S
        assert gpu.pci is None or gpu.pci.link.is_of_copies
    machine = make_machine(facts)
    assert not isinstance(machine, Refusal)
    assert machine.num_local_ranks == torch.cuda.device_count()
    assert all(finding.evidence for finding in find(facts))
