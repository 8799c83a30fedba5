"""What callers may pass as slots, read into plain ids and checked before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from mambapool.pool.errors import BadIndexTensor, DuplicateSlot, ReservedSlot, SlotOutOfRange

# A message is for people: the error's ``slots`` has them all.
_NAMED_AT_MOST = 8


def slot_ids(
    value: torch.Tensor | Sequence[int], *, size: int, what: str = "slots", distinct: bool = True
) -> list[int]:
    """The ids in ``value``, each from 1 to ``size``, in order.

    ``value`` is a tensor of integers of any width and device, strided or not, of one dimension or none, or
    a sequence of ints; an empty one may have any dtype. A tensor on a GPU is waited for. ``what`` names the
    argument in errors: :class:`BadIndexTensor`, :class:`SlotOutOfRange`, :class:`ReservedSlot` for 0, and
    with ``distinct`` :class:`DuplicateSlot`.
    """
    ids = _from_tensor(value, what) if isinstance(value, torch.Tensor) else _from_sequence(value, what)
    check_ids(ids, size, what)
    if distinct and len(set(ids)) < len(ids):
        twice = _repeated(ids)
        raise DuplicateSlot(f"{what}: slot {_named(twice)} is named more than once", twice)
    return ids


def check_ids(ids: list[int], size: int, what: str) -> None:
    """:class:`SlotOutOfRange` or :class:`ReservedSlot` unless each is from 1 to ``size``."""
    if ids and (min(ids) < 1 or max(ids) > size):
        _refuse_range(ids, size, what)


def check_form(value: torch.Tensor, what: str) -> None:
    """:class:`BadIndexTensor` for a tensor that cannot hold ids, whatever its values, which are not read."""
    if value.layout is not torch.strided or value.is_meta:
        raise BadIndexTensor(
            f"{what}: a {'meta' if value.is_meta else value.layout} tensor; pass a dense one with values"
        )
    if value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested"
        raise BadIndexTensor(f"{what}: a {kind} tensor; pass integers, for example a tensor of torch.int64")
    if value.dim() > 1:
        raise BadIndexTensor(
            f"{what}: a tensor of shape {tuple(value.shape)}; pass one dimension, for example t.flatten()"
        )
    if value.numel() == 0:
        return
    if value.dtype is torch.bool:
        raise BadIndexTensor(f"{what}: a mask; pass the ids, for example mask.nonzero().flatten()")
    if value.is_floating_point() or value.is_complex():
        raise BadIndexTensor(f"{what}: a tensor of {value.dtype}; pass integers, for example t.to(torch.int64)")


def _from_tensor(value: torch.Tensor, what: str) -> list[int]:
    ids: list[int]
    if value.dtype is torch.int64 and value.layout is torch.strided and value.dim() == 1 and not value.is_meta:
        # What schedulers pass, several times for every request: the checks below take longer than reading it.
        ids = value.tolist()
        return ids
    check_form(value, what)
    ids = value.reshape(-1).tolist()
    return ids


def _from_sequence(value: Sequence[int], what: str) -> list[int]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise BadIndexTensor(f"{what}: {value!r}; pass a tensor of integers or a list of ints, for example [3, 4]")
    ids = []
    for item in value:
        if isinstance(item, bool):
            raise BadIndexTensor(f"{what}: {item!r} of a mask; pass the ids at which it is true")
        try:
            ids.append(operator.index(item))
        except TypeError as error:
            raise BadIndexTensor(f"{what}: {item!r} is not an int; pass ids from 1 upwards") from error
    return ids


def _refuse_range(ids: list[int], size: int, what: str) -> None:
    outside = [slot for slot in ids if not 0 <= slot <= size]
    if outside:
        raise SlotOutOfRange(f"{what}: slot {_named(outside)} is not one of 1 to {size}", outside)
    raise ReservedSlot(f"{what}: slot 0 is reserved for padded batch entries; pass ids from 1 to {size}", [0])


def _repeated(ids: list[int]) -> list[int]:
    seen: set[int] = set()
    twice: dict[int, None] = {}
    for slot in ids:
        if slot in seen:
            twice[slot] = None
        seen.add(slot)
    return list(twice)


def _named(slots: list[int]) -> str:
    text = ", ".join(map(str, slots[:_NAMED_AT_MOST]))
    more = len(slots) - _NAMED_AT_MOST
    return f"{text} and {more} more" if more > 0 else text
