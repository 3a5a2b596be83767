"""Small HLO texts in the form that XLA:GPU prints: one stack of three layers in host memory."""

# ruff: noqa: E501 (the lines of the text are as long as the compiler prints them)

HEAD = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,8]{1,0})->f32[8,8]{1,0}}

FileNames
1 "model.py"

"""

WRAPPED = """%wrapped_dynamic-update-slice_computation (p.0: f32[3,8,8], p.1: f32[1,8,8], p.2: s32[], p.3: s32[]) -> f32[3,8,8] {
  %p.0 = f32[3,8,8]{2,1,0:S(5)} parameter(0)
  %p.1 = f32[1,8,8]{2,1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %p.3 = s32[] parameter(3)
  ROOT %dynamic-update-slice.5 = f32[3,8,8]{2,1,0:S(5)} dynamic-update-slice(%p.0, %p.1, %p.2, %p.3, %p.3)
}

%wrapped_dynamic-slice_computation (p.4: f32[3,8,8], p.5: s32[], p.6: s32[]) -> f32[1,8,8] {
  %p.4 = f32[3,8,8]{2,1,0:S(5)} parameter(0)
  %p.5 = s32[] parameter(1)
  %p.6 = s32[] parameter(2)
  ROOT %dynamic-slice.5 = f32[1,8,8]{2,1,0} dynamic-slice(%p.4, %p.5, %p.6, %p.6), dynamic_slice_sizes={1,8,8}
}

"""

BODY_HEAD = """%{name} ({name}.arg: (s32[], f32[8,8], f32[3,8,8])) -> (s32[], f32[8,8], f32[3,8,8]) {{
  %{name}.arg = (s32[], f32[8,8]{{1,0}}, f32[3,8,8]{{2,1,0:S(5)}}) parameter(0)
  %{name}.i = s32[] get-tuple-element(%{name}.arg), index=0
  %{name}.x = f32[8,8]{{1,0}} get-tuple-element(%{name}.arg), index=1
  %{name}.stack = f32[3,8,8]{{2,1,0:S(5)}} get-tuple-element(%{name}.arg), index=2
  %{name}.zero = s32[] constant(0)
  %{name}.row = f32[1,8,8]{{2,1,0}} bitcast(%{name}.x)
"""

GEMM = """  %gemm.{n} = (f32[8,8]{{1,0}}, s8[1024]{{0}}) custom-call(%{name}.x, %{name}.x), custom_call_target="__cublas$gemm", metadata={{op_name="jit(step)/while/body/checkpoint/dot_general"}}
  %y.{n} = f32[8,8]{{1,0}} get-tuple-element(%gemm.{n}), index=0
"""

START_OUT = """  %dynamic-update-slice-start.2 = ((f32[3,8,8]{2,1,0:S(5)}, f32[1,8,8]{2,1,0}, s32[], s32[]), f32[3,8,8]{2,1,0:S(5)}, u32[]) fusion-start(%fwd.stack, %fwd.row, %fwd.i, %fwd.zero), calls=%wrapped_dynamic-update-slice_computation, backend_config={"operation_queue_id":"1"}
"""
DONE_OUT = """  %dynamic-update-slice-done.2 = f32[3,8,8]{2,1,0:S(5)} fusion-done(%dynamic-update-slice-start.2), calls=%wrapped_dynamic-update-slice_computation
"""
START_IN = """  %dynamic-slice-start.3 = ((f32[3,8,8]{2,1,0:S(5)}, s32[], s32[]), f32[1,8,8]{2,1,0}, u32[]) async-start(%bwd.stack, %bwd.i, %bwd.zero), calls=%wrapped_dynamic-slice_computation
"""
DONE_IN = """  %dynamic-slice-done.3 = f32[1,8,8]{2,1,0} async-done(%dynamic-slice-start.3), calls=%wrapped_dynamic-slice_computation
"""
PLAIN_OUT = """  %wrapped_dynamic-update-slice.1 = f32[3,8,8]{2,1,0:S(5)} fusion(%fwd.stack, %fwd.row, %fwd.i, %fwd.zero), kind=kLoop, calls=%wrapped_dynamic-update-slice_computation
"""
PLAIN_IN = """  %wrapped_dynamic-slice.1 = f32[1,8,8]{2,1,0} fusion(%bwd.stack, %bwd.i, %bwd.zero), kind=kLoop, calls=%wrapped_dynamic-slice_computation
"""

TAIL = """  ROOT %{name}.out = (s32[], f32[8,8]{{1,0}}, f32[3,8,8]{{2,1,0:S(5)}}) tuple(%{name}.i, %{name}.x, %{name}.stack)
}}

"""

CONDITION = """%cond (c.arg: (s32[], f32[8,8], f32[3,8,8])) -> pred[] {
  %c.arg = (s32[], f32[8,8]{1,0}, f32[3,8,8]{2,1,0:S(5)}) parameter(0)
  %c.i = s32[] get-tuple-element(%c.arg), index=0
  %c.n = s32[] constant(3)
  ROOT %lt = pred[] compare(%c.i, %c.n), direction=LT
}

"""

ENTRY = """ENTRY %main.1 (x.1: f32[8,8]) -> f32[8,8] {
  %x.1 = f32[8,8]{1,0} parameter(0)
  %custom-call.host = f32[3,8,8]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %zero.1 = s32[] constant(0)
  %tuple.1 = (s32[], f32[8,8]{1,0}, f32[3,8,8]{2,1,0:S(5)}) tuple(%zero.1, %x.1, %custom-call.host)
  %while.1 = (s32[], f32[8,8]{1,0}, f32[3,8,8]{2,1,0:S(5)}) while(%tuple.1), condition=%cond, body=%fwd
  %while.2 = (s32[], f32[8,8]{1,0}, f32[3,8,8]{2,1,0:S(5)}) while(%while.1), condition=%cond, body=%bwd
  ROOT %y.1 = f32[8,8]{1,0} get-tuple-element(%while.2), index=1
}
"""


def body(name: str, *lines: str) -> str:
    return BODY_HEAD.format(name=name) + "".join(lines) + TAIL.format(name=name)


def gemm(name: str, n: int) -> str:
    return GEMM.format(name=name, n=n)


def scanned(forward: tuple[str, ...], backward: tuple[str, ...]) -> str:
    """A forward and a backward loop over one host stack, with these lines in their bodies."""
    return HEAD + WRAPPED + body("fwd", *forward) + body("bwd", *backward) + CONDITION + ENTRY


ENGAGED = scanned(
    (START_OUT, gemm("fwd", 1), DONE_OUT),
    (START_IN, gemm("bwd", 2), DONE_IN),
)
BARE = scanned(
    (gemm("fwd", 1), START_OUT, DONE_OUT),
    (START_IN, DONE_IN, gemm("bwd", 2)),
)
PLAIN = scanned((PLAIN_OUT, gemm("fwd", 1)), (PLAIN_IN, gemm("bwd", 2)))
CLONED = ENGAGED.replace(
    "  ROOT %fwd.out",
    "  %loop_fusion.3.remat = f32[8,8]{1,0} add(%fwd.x, %fwd.x)\n"
    "  %loop_fusion.3.remat2.1 = f32[8,8]{1,0} add(%fwd.x, %fwd.x)\n"
    "  ROOT %fwd.out",
)
ON_DEVICE = ENGAGED.replace("S(5)", "").replace("{2,1,0:}", "{2,1,0}")

UNROLLED = (
    HEAD
    + """ENTRY %main.2 (x.2: f32[8,8]) -> f32[8,8] {
  %x.2 = f32[8,8]{1,0} parameter(0)
  %copy-start.1 = (f32[8,8]{1,0:S(5)}, f32[8,8]{1,0}, u32[]) copy-start(%x.2)
  %dot.1 = f32[8,8]{1,0} dot(%x.2, %x.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %copy-done.1 = f32[8,8]{1,0:S(5)} copy-done(%copy-start.1)
  %copy-start.2 = (f32[8,8]{1,0}, f32[8,8]{1,0:S(5)}, u32[]) copy-start(%copy-done.1)
  %copy-done.2 = f32[8,8]{1,0} copy-done(%copy-start.2)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%dot.1, %copy-done.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
)
