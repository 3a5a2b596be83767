"""What this machine can do, and what of it makes offloading slow."""

from ebbtide.doctor.facts import Disk, Facts
from ebbtide.doctor.finding import Finding, Severity
from ebbtide.doctor.findings import find
from ebbtide.doctor.machine import Refusal, make_machine
from ebbtide.doctor.survey import survey

__all__ = ["Disk", "Facts", "Finding", "Refusal", "Severity", "find", "make_machine", "survey"]
