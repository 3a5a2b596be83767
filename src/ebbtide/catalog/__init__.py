"""Figures of known machines; `models`, `layers` and the others are imported by name."""

from ebbtide.catalog.machines import MACHINES, find_machine

__all__ = ["MACHINES", "find_machine"]
