"""What of a machine makes offloading slow, unsafe or impossible.

Rules are pure: they look at what was found out, and at nothing else. There is a module of them for
links, for memory, for disks and for software; each rule says what is wrong, by which figures, and
what to do.
"""

from ebbtide.doctor.about_disks import find_about_disk
from ebbtide.doctor.about_links import find_about_links
from ebbtide.doctor.about_memory import find_about_memory
from ebbtide.doctor.about_software import find_about_software
from ebbtide.doctor.facts import Facts
from ebbtide.doctor.finding import Finding, Severity


def find(facts: Facts) -> tuple[Finding, ...]:
    """Return what a person should know or change; serious findings come first."""
    found = [
        *find_about_software(facts),
        *find_about_links(facts),
        *find_about_memory(facts),
        *(finding for disk in facts.disks for finding in find_about_disk(disk)),
    ]
    return in_order(found)


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the serious ones first, and else in the order given."""
    return tuple(sorted(findings, key=lambda finding: finding.severity is not Severity.SERIOUS))
