"""Sessions on a GPU: which one, the one of its shard or the one that its caller named; and their allocators."""

from __future__ import annotations

import torch

from mambapool.client.allocator import SlotAllocator
from mambapool.client.device_slots import DeviceSlotTensors
from mambapool.client.fenced_allocator import FencedAllocator
from mambapool.client.fenced_guaranteed import FencedGuaranteed
from mambapool.client.fences import Fences
from mambapool.client.group import Group
from mambapool.client.group_fenced import GroupFencedGuaranteed
from mambapool.client.group_follower import FollowerAllocator
from mambapool.client.group_leader import LeaderAllocator
from mambapool.client.rank_fences import RankFences
from mambapool.client.transport import Transport
from mambapool.pool import cuda, cuda_tensors
from mambapool.pool.cuda_states import CudaStatePool
from mambapool.pool.errors import ConfigError, CudaError
from mambapool.pool.group_calls import BEGIN, CLEAR, END, FREE, TRANSFER
from mambapool.pool.state_pool import StatePool

#: Ids that only a GPU knows have a cell each: one per slot in the list, one in use, and those just freed.
_SPARE_CELLS = 1024

#: Calls of a group after which something may leave it. What a guarantee gets back stays on its list.
_LEAVING = frozenset({BEGIN, CLEAR, END, FREE, TRANSFER})
_LEAVING_A_GUARANTEE = frozenset({TRANSFER})


def check_device(device: torch.device) -> None:
    """:class:`ConfigError` when no GPU of that name can be used here."""
    try:
        devices = cuda.visible_devices()
    except CudaError as error:
        raise ConfigError(
            f"device {str(device)!r} cannot be used ({error}): pass 'cpu', or one that can"
        ) from error
    if device.index is not None and device.index >= len(devices):
        raise ConfigError(f"device {str(device)!r} is not there. {cuda.visible_text(devices)}")


def context_of(device: torch.device, pool: StatePool | None) -> cuda.PrimaryContext | None:
    """Where slot tensors go, and what has to be fenced; None for a session without a GPU.

    :class:`ConfigError` when ``device`` names another GPU than the one that the shard is on.
    """
    if isinstance(pool, CudaStatePool):
        if device.type == "cuda" and device.index not in (None, pool.ordinal):
            devices = cuda.visible_devices()
            raise ConfigError(
                f"device {str(device)!r} is {devices[device.index]}, and the shard is on {devices[pool.ordinal]}: "
                f"pass 'cuda:{pool.ordinal}', or 'cuda'"
            )
        ordinal = pool.ordinal
    elif device.type == "cuda":
        ordinal = cuda_tensors.current_device() if device.index is None else device.index
    else:
        return None
    return cuda.primary_context(cuda.visible_devices()[ordinal])


def allocator_on(
    device: torch.device | str, pool: StatePool | None, transport: Transport, group: Group | None, *, debug: bool
) -> tuple[SlotAllocator, Fences]:
    """The allocator of a session that has to do with a GPU."""
    context = context_of(torch.device(device), pool)
    assert context is not None
    slots: int = transport.session["slots"]
    guaranteed = bool(transport.session["guarantee"])
    fences = Fences(context)
    tensors = None
    if torch.device(device).type == "cuda":
        # Without a guarantee the ranks of a group read ids: rank 0 says them to the others.
        reads = group is not None and not guaranteed
        tensors = DeviceSlotTensors(slots, context, cells=0 if reads else 2 * slots + _SPARE_CELLS)
    if group is None:
        make = FencedGuaranteed if guaranteed else FencedAllocator
        return make(transport, device, fences=fences, tensors=tensors, debug=debug), fences
    group.use_fences(RankFences(group, fences, _LEAVING_A_GUARANTEE if guaranteed else _LEAVING))
    if guaranteed:
        return GroupFencedGuaranteed(transport, device, group, fences=fences, tensors=tensors, debug=debug), fences
    of_group = FollowerAllocator if group.rank else LeaderAllocator
    return of_group(transport, device, group, tensors=tensors, debug=debug), fences
