"""The recurrence that stands in for a model: every step of a request changes every word of its state.

A state's bytes are read as integer words, and each step is ``h ← a·h + x`` modulo 2**bits. The multiplier
``a`` is odd, so multiplying by it is a bijection of the words: when two histories of a word differ once,
they differ by ``a**k`` times that difference k steps later, which is never 0. No foreign write ever fades,
however long ago it was. (A floating-point recurrence would round it away.)

The input is ``x = drive(request, step) · weight(word)``. The drive mixes request and step, and at the
same step no two requests have the same; the weights are odd, and different for every word of a tensor. So
two requests that share a slot never write the same words into it, as long as words have 32 bits; words of
16 bits keep the lower half of all this, and agree by chance once in 65,536 times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A row's bytes as signed integers of 32 bits, or of 16 where a row has no whole number of 32 bits.
Words = NDArray[np.signedinteger[Any]]

#: Requests, steps and drives travel as 32 bits.
Keys = NDArray[np.uint32]

#: The odd ``a``, by bits of a word: the multipliers of two well-known linear congruential generators
#: (ANSI C's example ``rand``, and the one of many 16-bit machines), which spread a low bit quickly.
MULTIPLIER = {32: 1103515245, 16: 25173}

#: Odd constants of the golden ratio and of MurmurHash3 (public domain): a product with them is a bijection.
_REQUEST = np.uint32(0x9E3779B1)
_STEP = np.uint32(0x85EBCA77)
_MIX = np.uint32(0x85EBCA6B)

#: The "step" at which a request's first track slot gets what it holds before the first copy; the others
#: count down from it. No request runs that long.
FIRST_TRACK_STEP = 2**32 - 1


def drive(requests: Keys, steps: Keys) -> NDArray[np.int32]:
    """The part of the input that depends on request and step, one number per pair, shape as given.

    For a fixed step the function is a bijection of the request.
    """
    mixed = requests * _REQUEST + steps * _STEP
    mixed ^= mixed >> np.uint32(16)
    mixed *= _MIX
    mixed ^= mixed >> np.uint32(15)
    return mixed.view(np.int32)


def weights(words: int, bits: int) -> Words:
    """The part of the input that depends on the word: odd, and no two alike within 2**(bits - 1) words."""
    odd = 2 * np.arange(words, dtype=np.uint32) + np.uint32(1)
    spread = odd * _REQUEST
    return spread.view(np.int32) if bits == 32 else spread.astype(np.uint16).view(np.int16)
