"""Figures of known machines."""

from ebbtide.catalog.machines import MACHINES, find_machine

__all__ = ["MACHINES", "find_machine"]
