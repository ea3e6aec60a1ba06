"""From the bytes of a page to the arrays a step takes, without a copy."""

from dataclasses import dataclass

import jax
import numpy as np

from jitllm.kernels.tensor import QuantizedTensor


@dataclass(frozen=True)
class TensorView:
    """Where one tensor lies in a page. `shape` is (rows, columns), or (n,) for an F32 vector."""

    field: str
    """Its key in the weights: `attn_q`, `attn_q_bias`, `output_norm`, ..."""
    qtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def field_name(tensor: str) -> str:
    """GGUF tensor name -> key: `blk.3.attn_q.bias` -> `attn_q_bias`."""
    if tensor.startswith("blk."):
        tensor = tensor.split(".", 2)[2]
    return tensor.removesuffix(".weight").replace(".", "_")


def _on_device(view: np.ndarray, device: jax.Device, copy: bool) -> jax.Array:
    on_cpu = device.platform == "cpu"
    if copy:
        # A CPU device takes an aligned host array for its own, whatever `may_alias` says.
        return jax.device_put(view.copy() if on_cpu else view, device)
    array = jax.device_put(view, device)
    aliases = on_cpu and array.unsafe_buffer_pointer() == view.ctypes.data
    assert aliases, "a view of a page must be 64-byte aligned, or the step would copy it"
    return array


def weight_views(
    page: np.ndarray, layout: tuple[TensorView, ...], device: jax.Device, *, copy: bool = False
) -> dict[str, QuantizedTensor | jax.Array]:
    """The weights in `page` uint8[bytes] as arrays on `device`, a CPU device unless `copy`.

    Without `copy` they alias the page: what is written there later is what a later step reads, so
    a page may be overwritten only when the steps that were given these arrays are ready.
    """
    weights = {}
    for view in layout:
        data = page[view.offset : view.offset + view.n_bytes]
        if len(view.shape) == 1:
            weights[view.field] = _on_device(data.view(np.float32), device, copy)
            continue
        tiles = data.reshape(-(-view.shape[0] // 16), -1)
        array = _on_device(tiles, device, copy)
        weights[view.field] = QuantizedTensor(array, view.qtype, view.shape)
    return weights


def vectors(page: np.ndarray, layout: tuple[TensorView, ...]) -> dict[str, np.ndarray]:
    """Copies f32[n] of the vectors in `page`."""
    return {
        view.field: page[view.offset : view.offset + view.n_bytes].view(np.float32).copy()
        for view in layout
    }
