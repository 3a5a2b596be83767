"""What a device holds all through a step: weights, gradients, optimizer state, buffers.

Exact for the rules below, each of which some library follows; others lay things out otherwise.

- FSDP shares out weights, gradients and optimizer state. A layer is gathered before it runs, with
  the next one on its way: two whole layers, and one layer's whole gradients, are there at once.
- Tensor parallelism splits matrices; norms and routers are copied.
- Expert parallelism shares out routed experts, and where there is FSDP also all else.
- Gradients of everything that is trained are there all through the step, as from its second
  micro-batch on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.ops import BF16_BYTES, FP32_BYTES
from ebbtide.catalog.shapes import Family, Parameters
from ebbtide.estimate.setup import Dtype, Optimizer, Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes on one device."""

    weights: int
    """Its share."""
    gradients: int
    """Of what is trained."""
    optimizer: int
    """Of what is trained."""
    communication: int
    """Whole layers that FSDP gathered, and what other ranks send."""
    num_parameters: int
    """On this device, trained or not."""
    num_trained: int
    """Of them."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The part of a model that one pipeline rank has."""

    first_layer: int
    """Counted from 0."""
    num_layers: int
    """Of this stage."""
    has_embedding: bool
    """The first one has it."""
    has_head: bool
    """The last one has it."""
    num_in_flight: int
    """Micro-batches whose activations it holds at once."""


def stages_of(setup: Setup) -> tuple[Stage, ...]:
    """Return the first stage and the last, which hold most; one stage if there is no pipeline.

    In 1F1B the first stage has as many micro-batches in flight as there are stages, the last one
    has one.
    """
    pp = setup.degrees.pp
    size = setup.shape.num_layers // pp
    if pp == 1:
        return (
            Stage(
                first_layer=0,
                num_layers=size,
                has_embedding=True,
                has_head=True,
                num_in_flight=1,
            ),
        )
    return (
        Stage(
            first_layer=0,
            num_layers=size,
            has_embedding=True,
            has_head=False,
            num_in_flight=min(pp, setup.accumulate),
        ),
        Stage(
            first_layer=setup.shape.num_layers - size,
            num_layers=size,
            has_embedding=False,
            has_head=True,
            num_in_flight=1,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Parameters of a tensor-parallel rank, before FSDP and expert parallelism share them out."""

    dense: int
    """But for routed experts."""
    experts: int = 0
    """Routed experts, of all expert-parallel ranks."""


def layers_of(setup: Setup, stage: Stage) -> tuple[Whole, ...]:
    """Return the parameters of each layer of a stage."""
    layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
    return tuple(_whole(setup, setup.shape.layer_parameters(i)) for i in layers)


def ends_of(setup: Setup, stage: Stage) -> int:
    """Return the parameters of a stage that are in no layer."""
    shape, tp = setup.shape, setup.degrees.tp
    ends = 0
    if stage.has_embedding:
        ends += _share(shape.embedding_parameters, tp)
    if stage.has_head:
        # A tied head on a stage of its own needs the embedding there as well.
        is_copy = shape.is_tied and not stage.has_embedding
        head = shape.vocab * shape.hidden if is_copy else shape.head_parameters
        ends += _share(head, tp) + shape.norm_parameters
    return ends


def resident_of(setup: Setup, stage: Stage) -> Resident:
    """Return what a device of the stage holds all through a step."""
    degrees, shape = setup.degrees, setup.shape
    width = setup.dtype.width_bytes
    layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
    whole = layers_of(setup, stage)
    num_parameters = 0
    for layer in whole:
        num_parameters += _share(layer.dense, degrees.num_shards)
        num_parameters += _share(layer.experts, degrees.num_expert_shards)
    num_parameters += _share(ends_of(setup, stage), degrees.num_shards)
    num_trained = num_parameters
    if setup.lora_rank:
        form = setup.form(is_rerun=False)
        adapters = sum(make_layer(shape, i, form).lora_parameters for i in layers)
        num_trained = _share(adapters, degrees.num_shards)
        num_parameters += num_trained
    return Resident(
        weights=width * num_parameters,
        gradients=width * num_trained,
        optimizer=optimizer_bytes(setup.optimizer, setup.dtype) * num_trained,
        communication=_communication(setup, whole),
        num_parameters=num_parameters,
        num_trained=num_trained,
    )


def optimizer_bytes(optimizer: Optimizer, dtype: Dtype) -> int:
    """Return what it keeps for each parameter, beside weight and gradient."""
    master = 0 if dtype is Dtype.FP32 else FP32_BYTES
    return {
        Optimizer.NONE: 0,
        Optimizer.SGD: 0,
        Optimizer.ADAMW: 2 * FP32_BYTES + master,
        Optimizer.ADAMW_BF16: 2 * BF16_BYTES,
        Optimizer.ADAMW_8BIT: 2,
    }[optimizer]


def _whole(setup: Setup, parameters: Parameters) -> Whole:
    tp = setup.degrees.tp
    return Whole(
        dense=_share(parameters.split, tp) + parameters.copied,
        experts=_share(parameters.experts, tp),
    )


def _communication(setup: Setup, whole: Sequence[Whole]) -> int:
    degrees, shape = setup.degrees, setup.shape
    width = setup.dtype.width_bytes
    stream_bytes = setup.tokens * shape.hidden * width
    num_bytes = 0
    if degrees.num_shards > 1:
        # A rank never gathers the experts of other expert-parallel ranks.
        gathered = max(layer.dense + _share(layer.experts, degrees.ep) for layer in whole)
        num_bytes += 2 * gathered * width
        if not setup.lora_rank:
            num_bytes += gathered * width
    if degrees.tp > 1:
        # One sum, or with sequence parallelism one gathered input.
        num_bytes += stream_bytes
    if degrees.cp > 1:
        kv_width = 2 * shape.kv_heads * shape.head_width
        if shape.family is Family.DEEPSEEK:
            kv_width = shape.query_width + shape.value_width
        # Keys and values of the next rank arrive while those of the last are used.
        num_bytes += 2 * setup.tokens * (kv_width // degrees.tp) * width
    if degrees.ep > 1 and shape.experts is not None:
        # What is sent to other ranks' experts, beside what came, which is an activation.
        num_bytes += stream_bytes * shape.experts.num_routed
    if degrees.pp > 1:
        num_bytes += 2 * stream_bytes
    return num_bytes


def _share(number: int, ranks: int) -> int:
    return -(-number // ranks)
