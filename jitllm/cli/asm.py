"""`jitllm asm`: the machine code behind a product."""

from jitllm.errors import JitllmError, UsageError


def asm(qtype: str, /) -> None:
    """Print the assembly that is generated here for products with weights of a type.

    `one` is the product with one token; `unpack` and `panel` are that with many.
    JITLLM_CPU_TIER names a lower tier.

    Args:
        qtype: A weight type, such as Q4_K.
    """
    from jitllm.kernels.qtypes import QTYPES

    name = qtype.upper()
    if name not in QTYPES:
        raise UsageError(f"{qtype} is not a weight type of jitllm ({', '.join(QTYPES)})")
    try:
        from jitllm.kernels.cpu.compile import assembly, tier
        from jitllm.kernels.cpu.products import build_panel, build_type, shape_of
    except ImportError as error:
        raise JitllmError(f"nothing is generated here: {error}") from None
    here = tier()
    for unit, build in ((name, build_type(name)), ("panel", build_panel(shape_of(name)))):
        print(f"# {unit} for {here.name}")
        print(assembly(build, here))
