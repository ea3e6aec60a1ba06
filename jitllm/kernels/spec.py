"""What is static about an attention call: all that a kernel may specialise on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """One block's attention. N query heads share K key-value heads; H is the size of a head."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    """R: the first R values of a head are rotated, the rest pass through."""
    rope_style: str = "norm"
    """`norm` rotates the pairs (2i, 2i+1), `neox` the pairs (i, i + R/2)."""
    scale: float = 1.0
    """Multiplies q.k before soft-capping and softmax."""
    window: int = 0
    """A query at position p sees the keys at p - window + 1 .. p; 0: all of them."""
    softcap: float = 0.0
    """s becomes softcap * tanh(s / softcap); 0: left alone."""
    norm_eps: float = 1e-6
    """Epsilon of the Q and K head norms, where a model has them."""
