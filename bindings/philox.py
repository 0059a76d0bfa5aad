"""uniforms_for inside a device's graph: Philox4x32-10 in torch operations that any integer unit computes exactly.

A 32-bit word is three limbs of 11, 11 and 10 bits, so that every product and sum stays below 2^24: exact even where
int32 arithmetic runs through fp32, as the Vector engine's does.
"""

from __future__ import annotations

import torch

from draft_verify.reference.uniforms_for import KEY_STEPS, MULTIPLIERS, PURPOSES, ROUNDS

_LOW = 0x7FF  # 11 bits
_TOP = 0x3FF  # 10 bits
Word = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, K: int, purpose: str) -> torch.Tensor:
    """See `draft_verify.uniforms_for`; [B, K + 2] float32 on the seeds' device."""
    seeds = _signed(seeds)
    key_low = _word(seeds[:, None])
    key_high = _word(seeds[:, None], 32) if seeds.dtype == torch.int64 else _word((seeds >> 31)[:, None])
    columns = torch.arange(K + 2, dtype=torch.int32, device=seeds.device)[None, :]
    zero = torch.zeros_like(columns)
    counter = (_word(_signed(positions)[:, None]), _word(columns), _word(zero + PURPOSES[purpose]), _word(zero))
    low, middle, top = _philox(counter, key_low, key_high)[0]
    random = (low >> 9) + middle * 4 + top * 8192  # the word >> 9, 23 bits
    return (random.to(torch.float32) + 0.5) * 2.0**-23


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """int32 or int64 with the same bits; a uint32 grows so that its top bit stays a magnitude."""
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64)
    return tensor.to(torch.int64) if tensor.dtype == torch.uint32 else tensor


def _word(value: torch.Tensor, shift: int = 0) -> Word:
    """Bits shift..shift+31 of an integer tensor."""
    limbs = (value >> shift & _LOW, value >> (shift + 11) & _LOW, value >> (shift + 22) & _TOP)
    return tuple(limb.to(torch.int32) for limb in limbs)


def _constant(value: int) -> tuple[int, int, int]:
    return value & _LOW, value >> 11 & _LOW, value >> 22


def _multiply(word: Word, constant: int) -> tuple[Word, Word]:
    """High and low word of the 64-bit product."""
    a, b, c = word
    x, y, z = _constant(constant)
    columns = (a * x, a * y + b * x, a * z + b * y + c * x, b * z + c * y, c * z)
    limbs, carry = [], 0
    for column in columns:
        column = column + carry
        limbs.append(column & _LOW)
        carry = column >> 11
    r0, r1, r2, r3, r4 = limbs
    low = (r0, r1, r2 & _TOP)
    high = ((r2 >> 10) + (r3 & _TOP) * 2, (r3 >> 10) + (r4 & _TOP) * 2, (r4 >> 10) + carry * 2)
    return high, low


def _xor(first: Word, second: Word) -> Word:
    return tuple(a ^ b for a, b in zip(first, second))


def _add(word: Word, constant: int) -> Word:
    x, y, z = _constant(constant)
    low = word[0] + x
    middle = word[1] + y + (low >> 11)
    return low & _LOW, middle & _LOW, word[2] + z + (middle >> 11) & _TOP


def _philox(counter: tuple[Word, Word, Word, Word], key_low: Word, key_high: Word) -> tuple[Word, Word, Word, Word]:
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high2, low2 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = _xor(_xor(high2, c1), key_low), low2, _xor(_xor(high0, c3), key_high), low0
        key_low, key_high = _add(key_low, KEY_STEPS[0]), _add(key_high, KEY_STEPS[1])
    return c0, c1, c2, c3
