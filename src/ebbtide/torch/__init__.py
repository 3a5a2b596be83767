"""ebbtide for PyTorch."""

from ebbtide.torch.attach import Tide, attach
from ebbtide.torch.observe import observe

__all__ = ["Tide", "attach", "observe"]
