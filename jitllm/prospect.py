"""What an engine will be, from the container's head and the machine: no weight is read, nothing of
the model's size is allocated. The engine is made from it, and `jitllm plan` shows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jitllm.errors import BudgetError, FormatError, SettingError
from jitllm.executor import CHUNK_TOKENS
from jitllm.kernels.ops import choose
from jitllm.model.config import ModelConfig
from jitllm.model.kvcache import kv_bytes
from jitllm.paging import policy
from jitllm.paging.budget import AUTOMATIC_SHARE, memory_limits, usable_cores
from jitllm.paging.container import Container, remake
from jitllm.paging.pager import fixed_bytes, whole_cycle
from jitllm.placement.devices import HOST, Device, limit, open_devices, parse_devices
from jitllm.placement.plan import Plan
from jitllm.placement.planner import plan
from jitllm.placement.rules import Profile
from jitllm.residence import host_cycle
from jitllm.units import format_size

DEFAULT_MAX_SEQ = 4096
"""Tokens of context where nobody asks: the KV cache is allocated whole."""
_STEP_BYTES = 64 << 10
"""What a step needs whatever its rows: tables, scratch of the kernels."""
_FIRST_CAPACITY = 256
"""Tokens that a cache holds at first where blocks give way to its growth."""


@dataclass(frozen=True)
class Prospect:
    """A model, a budget and devices, put together and checked."""

    container: Container
    config: ModelConfig
    max_seq: int
    kv_dtype: str
    profile: Profile
    devices: tuple[Device, ...]
    """Where blocks can be: the host, whose budget is for weights, then what `-devices` opened."""
    automatic: bool
    """Whether the budget was chosen by the machine's free memory."""
    n_threads: int
    """Of the CPU, to compute with."""
    process_limit: int | None = None
    """What all lines of the ledger together may take."""

    def under(self, budget_bytes: int) -> "Prospect":
        """The same under another budget of the host."""
        host, *others = self.devices
        return replace(self, devices=(replace(host, budget_bytes=budget_bytes), *others))

    @property
    def budget_bytes(self) -> int:
        """The host's budget for weights."""
        return self.devices[0].budget_bytes

    @property
    def first_capacity(self) -> int:
        """Tokens that a conversation's cache holds at first."""
        return min(self.max_seq, _FIRST_CAPACITY) if self.profile.relocate else self.max_seq

    @cached_property
    def plan(self) -> Plan:
        """Where every part of the model goes, and why."""
        kv = self.kv_sizes(self.first_capacity)
        return plan(self.container.pages, self.devices, self.profile, kv, self.workspace_bytes)

    @property
    def cycle(self) -> list[int]:
        """The pages that a pass visits on the host."""
        return host_cycle(self.container, self.plan)

    @property
    def fixed_bytes(self) -> int:
        """Of the budget, what is not pages that a pass visits."""
        return fixed_bytes(self.container)

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that works."""
        pages = self.container.pages
        return self.fixed_bytes + policy.smallest_bytes([pages[p].n_bytes for p in self.cycle])

    @property
    def most_bytes(self) -> int:
        """The largest budget that is of use: for all of the model, should all of it come home."""
        pages = self.container.pages
        cycle = sum(pages[page].n_bytes for page in whole_cycle(self.container))
        return self.fixed_bytes + cycle + self.embedding_bytes

    @property
    def spare_bytes(self) -> int | None:
        """What the process limit leaves beside the weights and what one conversation takes."""
        if self.process_limit is None:
            return None
        taken = self.budget_bytes + self.host_kv_bytes + self.workspace_bytes
        return max(0, self.process_limit - taken)

    @property
    def host_kv_bytes(self) -> int:
        """What one conversation's cache takes of the host at first."""
        return sum(part.kv_bytes for part in self.plan.blocks if part.kv_device == HOST)

    @property
    def embedding_bytes(self) -> int:
        """Rows that are looked up one by one, and stay in memory where all else does."""
        pages = self.container.pages
        return sum(pages[page].n_bytes for page in self.container.pages_of("embed"))

    def kv_sizes(self, n_tokens: int) -> list[int]:
        """Each block's bytes for a cache of `n_tokens`."""
        return [kv_bytes(s.attention, n_tokens, self.kv_dtype) for s in self.config.blocks]

    @property
    def workspace_bytes(self) -> int:
        """The most that a step's activations take on a device, from their shapes: of a prefill,
        the residual as it comes and goes and what a product reads and writes, or one row's logits
        twice; where the portable operations run, a block's weights and its cache as f32 too."""
        c, a = self.config, self.config.blocks[0].attention
        heads = (a.n_heads + 2 * a.n_kv_heads) * a.head_dim
        row = 4 * c.width + 2 * max(c.ff_width, heads) + sum(rope.dim for rope in c.ropes)
        n_bytes = max(4 * CHUNK_TOKENS * row, 8 * c.n_vocab) + _STEP_BYTES
        if any(choose(device.platform)[0].one_row for device in self.devices[1:]):
            n_bytes += 4 * _most_weights(self.container)
            n_bytes += max(kv_bytes(block.attention, self.max_seq, "f32") for block in c.blocks)
        return n_bytes


def _most_weights(container: Container) -> int:
    """Of all blocks and slabs of the head, the most that one has."""
    pages = (*container.pages_of("block"), *container.pages_of("head"))
    tensors = (container.on_page(page).values() for page in pages)
    return max(sum(math.prod(tensor.shape) for tensor in each) for each in tensors)


def devices_of(profile: Profile, vram: int | None = None) -> list[Device]:
    """The devices that `profile` names, open, the host first; without any, those of `auto`."""
    requests = profile.devices or parse_devices("auto")
    return open_devices(limit(requests, vram), _free_memory)


def look_ahead(
    container: Container,
    devices: Sequence[Device],
    profile: Profile,
    budget_bytes: int | None,
    max_seq: int | None,
    kv: str,
    threads: int | None = None,
    process_limit: int | None = None,
) -> Prospect:
    """The prospect of `container` on `devices`, the host first; `budget_bytes` None is automatic,
    `max_seq` None the model's own, at most 4096, and `threads` None the cores there are.

    BudgetError: `process_limit` is too little for the budget and what is beside it.
    """
    host, *others = devices
    config = _config(container)
    budget = _automatic_budget(others) if budget_bytes is None else budget_bytes
    prospect = Prospect(
        container=container,
        config=config,
        max_seq=_max_seq(config, max_seq),
        kv_dtype=kv,
        profile=profile,
        devices=(replace(host, budget_bytes=budget), *others),
        automatic=budget_bytes is None,
        n_threads=usable_cores() if threads is None else threads,
        process_limit=process_limit,
    )
    return prospect if process_limit is None else _limited(prospect, process_limit)


def _limited(prospect: Prospect, limit_bytes: int) -> Prospect:
    """`prospect` within the limit, for which an automatic budget gives way: to all else, and to
    further conversations as far as the model has no use for it."""
    kv, activations = prospect.host_kv_bytes, prospect.workspace_bytes
    if prospect.automatic:
        room = max(limit_bytes - kv - activations, prospect.smallest_bytes)
        prospect = prospect.under(min(prospect.budget_bytes, prospect.most_bytes, room))
    total = prospect.budget_bytes + kv + activations
    if total > limit_bytes:
        lacking = format_size(total - limit_bytes)
        raise BudgetError(
            f"a process limit of {format_size(limit_bytes)} is {lacking} too small: weights take"
            f" {format_size(prospect.budget_bytes)}, the KV cache of {prospect.max_seq} tokens"
            f" {format_size(kv)} and activations {format_size(activations)}; lower -maxmem or"
            " -max-seq, or raise --process-limit",
            total,
        )
    return prospect


def _config(container: Container) -> ModelConfig:
    try:
        return ModelConfig.from_dict(container.metadata["config"])
    except (KeyError, TypeError) as error:
        raise FormatError(
            f"{container.path} was written by another version of jitllm; {remake(container.path)}"
        ) from error


def _max_seq(config: ModelConfig, asked: int | None) -> int:
    longest = config.context_length
    if asked is None:
        return min(longest, DEFAULT_MAX_SEQ)
    if not 1 <= asked <= longest:
        raise SettingError(
            "max_seq", f"max_seq is {asked}; this model's context is 1 to {longest} tokens"
        )
    return asked


def _free_memory() -> tuple[int, int]:
    """Free and total bytes, within the control groups around the process."""
    limits = memory_limits()
    return limits.usable_bytes, limits.total_bytes


def _automatic_budget(others: Sequence[Device]) -> int:
    """The host's budget where nobody sets one: its share of what devices in the same memory, which
    have theirs already, leave free."""
    lent = sum(device.budget_bytes or 0 for device in others if device.shares_host_memory)
    return int(max(0, memory_limits().usable_bytes - lent) * AUTOMATIC_SHARE)
