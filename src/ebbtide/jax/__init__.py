"""ebbtide for JAX: a policy for a budget, its flags, and evidence that it does what it says."""

from ebbtide.jax.attention import nameable, reference_attention
from ebbtide.jax.engagement import check_engagement
from ebbtide.jax.flag_check import check_flags
from ebbtide.jax.flags import xla_flags
from ebbtide.jax.names import names_of, with_names
from ebbtide.jax.observe import Observation, Rates, observe
from ebbtide.jax.policy import NamedPolicy, Residual, check_policy, residuals_of
from ebbtide.jax.step import StepMemory, StepPlan, plan_step
from ebbtide.jax.tide import Tide, plan_for
from ebbtide.jax.verify import scan_body, verify, verify_stacks

__all__ = [
    "NamedPolicy",
    "Observation",
    "Rates",
    "Residual",
    "StepMemory",
    "StepPlan",
    "Tide",
    "check_engagement",
    "check_flags",
    "check_policy",
    "nameable",
    "names_of",
    "observe",
    "plan_for",
    "plan_step",
    "reference_attention",
    "residuals_of",
    "scan_body",
    "verify",
    "verify_stacks",
    "with_names",
    "xla_flags",
]
