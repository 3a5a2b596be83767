"""ebbtide for JAX: flags, and evidence that a plan's copies happen and its gradients are right."""

from ebbtide.jax.verify import verify, verify_stacks

__all__ = ["verify", "verify_stacks"]
