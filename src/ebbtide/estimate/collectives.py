"""What collectives take: bytes that follow from the degrees, over what a network reaches.

A model, not a measurement. Tensor-parallel ranks are next to each other, then those of context,
experts, FSDP, copies, and stages. Two rules, both assumptions:

- tensor-parallel sums, the exchange between experts, and what goes from stage to stage are
  waited for;
- FSDP's gathers and sums, the ring of keys and values, and the sum of gradients over copies run
  beside compute, and count only where they take longer.

Known weakness: latency, and what collectives take of the compute of others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ebbtide.catalog.calls import Exchange, Rates
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.networks import Axis, Dimension, Network
from ebbtide.estimate.resident import Resident, Stage, ends_of, layers_of
from ebbtide.estimate.setup import Degrees, Setup
from ebbtide.plan import Decision, Plan
from ebbtide.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Collectives that are no part of a layer's ops; 0 where there are none."""

    shards_ns: int
    """FSDP's gathers for forward and backward and its sums of gradients, of a micro-batch."""
    copies_ns: int
    """The sum of gradients over copies of the model, once a step."""
    stages_ns: int
    """An input and a gradient from stage to stage, of a micro-batch."""

    def step_ns(self, compute_ns: int, num_micro_batches: int, num_stages: int) -> int:
        """Return the time of a step.

        Args:
            compute_ns: Of a micro-batch in the slowest stage, with the copies that it waits for.
            num_micro_batches: In the step.
            num_stages: Of the pipeline.
        """
        micro_batch_ns = max(compute_ns, self.shards_ns) + self.stages_ns
        # The sum over copies runs beside the last micro-batch's backward.
        return micro_batch_ns * (num_micro_batches + num_stages - 1) + max(
            0, self.copies_ns - compute_ns
        )


def dimensions_of(degrees: Degrees) -> dict[Axis, Dimension]:
    """Return where the ranks of each kind are."""
    found: dict[Axis, Dimension] = {}
    stride = 1
    for axis in Axis:
        size = getattr(degrees, axis.value)
        found[axis] = Dimension(stride=stride, size=size)
        stride *= size
    return found


def with_network(rates: Rates, degrees: Degrees, network: Network) -> Rates:
    """Return the rates with those of the collectives that are a part of a layer's ops."""
    at = dimensions_of(degrees)
    return replace(
        rates,
        sent_bytes_per_ns={
            Axis.TENSOR: network.ring_bytes_per_ns([at[Axis.TENSOR]]),
            Axis.CONTEXT: network.ring_bytes_per_ns([at[Axis.CONTEXT]]),
            Axis.EXPERT: network.exchange_bytes_per_ns([at[Axis.EXPERT]]),
        },
    )


def between_layers(
    setup: Setup, stage: Stage, resident: Resident, network: Network | None
) -> Between:
    """Return the collectives of a stage that are no part of its layers' ops.

    Args:
        setup: The question.
        stage: Of the pipeline.
        resident: What a device of it holds.
        network: None: they take no time.
    """
    if network is None:
        return Between(shards_ns=0, copies_ns=0, stages_ns=0)
    degrees, width = setup.degrees, setup.dtype.width_bytes
    at = dimensions_of(degrees)
    layers = layers_of(setup, stage)
    dense = width * (sum(layer.dense for layer in layers) + ends_of(setup, stage))
    experts = width * sum(layer.experts for layer in layers) // degrees.ep
    shards_ns = copies_ns = stages_ns = 0
    copies = [at[Axis.CONTEXT], at[Axis.COPIES]]
    if degrees.fsdp > 1:
        num_shards = degrees.num_shards
        is_all_trained = not setup.lora_rank
        for num_bytes, group in (
            (dense, [at[Axis.EXPERT], at[Axis.SHARDS]]),
            (experts, [at[Axis.SHARDS]]),
        ):
            # Gathered for forward and for backward, and gradients summed up.
            shards_ns += (3 if is_all_trained else 2) * _ring_ns(num_bytes, group, network)
        if not is_all_trained:
            adapters = width * resident.num_trained * num_shards
            shards_ns += _ring_ns(adapters, [at[Axis.EXPERT], at[Axis.SHARDS]], network)
        copies_ns = 2 * _ring_ns(resident.gradients, copies, network)
    elif setup.lora_rank:
        copies_ns = 2 * _ring_ns(resident.gradients, [*copies, at[Axis.EXPERT]], network)
    else:
        # Each expert-parallel rank has all but the experts, and its own batch.
        copies_ns = 2 * _ring_ns(dense, [at[Axis.EXPERT], *copies], network)
        copies_ns += 2 * _ring_ns(experts, copies, network)
    if degrees.pp > 1:
        next_stage = replace(at[Axis.STAGES], size=2)
        rate = network.exchange_bytes_per_ns([next_stage])
        stages_ns = ceil(2 * setup.tokens * setup.shape.hidden * width / rate)
    return Between(shards_ns=shards_ns, copies_ns=copies_ns, stages_ns=stages_ns)


def in_layers_ns(
    setup: Setup, stage: Stage, rates: Rates, plan: Plan, workload: Workload
) -> Mapping[Axis, int]:
    """Return what the collectives within layers take of a micro-batch, each alone.

    Those of what the plan runs again count again.
    """
    found: dict[Axis, int] = {}
    form = setup.form(is_rerun=True)
    exchanges: dict[bool, list[tuple[str, Exchange]]] = {}
    for layer, block in enumerate(workload.blocks[: stage.num_layers], stage.first_layer):
        kind = setup.shape.has_experts(layer)
        if kind not in exchanges:
            calls = make_layer(setup.shape, layer, form).calls
            exchanges[kind] = [(c.names[0], sent) for c in calls for sent in c.exchanges]
        for name, sent in exchanges[kind]:
            is_again = plan.decisions.get(block.name + name) is Decision.RECOMPUTE
            forward_ns = rates.sent_ns(sent.axis, sent.forward_bytes)
            taken_ns = (2 if is_again else 1) * forward_ns
            taken_ns += rates.sent_ns(sent.axis, sent.backward_bytes)
            found[sent.axis] = found.get(sent.axis, 0) + taken_ns
    return found


def _ring_ns(num_bytes: int, group: Sequence[Dimension], network: Network) -> int:
    """Return how long it takes to gather so many bytes, or to sum them up into shares."""
    size = 1
    for dimension in group:
        size *= dimension.size
    if size == 1:
        return 0
    return ceil(num_bytes * (size - 1) / size / network.ring_bytes_per_ns(group))
