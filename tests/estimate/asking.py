"""Questions for tests."""

from ebbtide.budget import parse_budget
from ebbtide.catalog.accelerators import ACCELERATORS
from ebbtide.catalog.calls import Rates
from ebbtide.catalog.machines import find_machine
from ebbtide.catalog.networks import NETWORKS
from ebbtide.estimate.setup import Setup
from ebbtide.estimate.strategies import Estimator, Limits
from ebbtide.machine import Machine


def limits_of(machine: Machine, budget: str = "auto") -> Limits:
    """What the command takes by default."""
    return Limits(
        budget_bytes=parse_budget(budget, machine.device_bytes),
        host_bytes=machine.host_bytes_per_rank,
        disk_bytes=machine.disk_bytes,
    )


def ask(
    setup: Setup,
    name: str = "h200-pcie5",
    *,
    machine: Machine | None = None,
    budget: str = "auto",
    names: list[str] | None = None,
    rates: Rates | None = None,
    is_networked: bool = True,
) -> Estimator:
    """Return the estimator for a question on a machine of the catalog."""
    machine = machine or find_machine(name)
    return Estimator(
        setup,
        machine,
        ACCELERATORS[name],
        limits_of(machine, budget),
        network=NETWORKS[name] if is_networked else None,
        names=names,
        rates=rates,
    )
