"""`jitllm asm`: the machine code behind a product."""

from jitllm.errors import JitllmError, UsageError


def asm(qtype: str, /) -> None:
    """Print the assembly that is generated here for products with weights of a type.

    `one` is the product with one token; `unpack` and `panel` are that with many.
    JITLLM_CPU_TIER names a lower tier.

    Args:
        qtype: A weight type, such as Q4_K.
    """
    from jitllm.kernels.ops import choose
    from jitllm.kernels.qtypes import QTYPES

    name = qtype.upper()
    if name not in QTYPES:
        raise UsageError(f"{qtype} is not a weight type of jitllm ({', '.join(QTYPES)})")
    ops, note = choose("cpu")
    if ops.name != "cpu":
        raise JitllmError(f"nothing is generated here: the kernels are {note}")
    from jitllm.kernels.cpu.compile import tier
    from jitllm.kernels.cpu.matmul import type_assembly

    print(f"# {name} {note}\n{type_assembly(name, tier())}", end="")
