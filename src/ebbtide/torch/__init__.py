"""ebbtide for PyTorch."""

from ebbtide.torch.attach import Tide, attach

__all__ = ["Tide", "attach"]
