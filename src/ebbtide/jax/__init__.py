"""ebbtide for JAX: flags, and evidence that a plan's copies happen and its gradients are right."""

from ebbtide.jax.engagement import check_engagement
from ebbtide.jax.flag_check import check_flags
from ebbtide.jax.flags import xla_flags
from ebbtide.jax.verify import verify, verify_stacks

__all__ = ["check_engagement", "check_flags", "verify", "verify_stacks", "xla_flags"]
