"""How evenly a mixture of experts spreads its tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def describe_routing(model: PreTrainedModel, ids_BT: torch.Tensor) -> str:
    """Return how often the busiest and the idlest expert of any block are chosen.

    Empty for a model without routers. Runs one forward pass without gradients.

    Args:
        model: The model; transformers' routers are found by their class.
        ids_BT: Token ids to route.
    """
    counts: list[torch.Tensor] = []

    def count(router: Any, arguments: Any, output: Any) -> None:
        chosen = next(part for part in output if not part.is_floating_point())
        counts.append(torch.bincount(chosen.flatten().cpu(), minlength=router.num_experts))

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    if not routers:
        return ""
    handles = [router.register_forward_hook(count) for router in routers]
    try:
        with torch.no_grad():
            model.base_model(input_ids=ids_BT)
    finally:
        for handle in handles:
            handle.remove()
    shares = [(chosen / chosen.double().mean()).tolist() for chosen in counts]
    num_idle = sum(int((chosen == 0).sum()) for chosen in counts)
    idle = f", {num_idle} of {sum(map(len, shares))} got no token" if num_idle else ""
    return (
        f"routing of random weights, no bias: the busiest expert of a block gets "
        f"{max(map(max, shares)):.1f} times the mean load, the idlest {min(map(min, shares)):.2f} "
        f"times{idle}"
    )
