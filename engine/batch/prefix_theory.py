"""How many prompt tokens a perfect prefix cache could take from others: the measure for the one that we have."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

_TOKEN_BYTES = 4


def max_shared_tokens(prompts: Iterable[array[int]]) -> int:
    """Tokens of the prompts that need no computing when every distinct prefix is computed once.

    That is all tokens less the nodes of the prompts' trie; but each prompt computes its last token itself, because
    the logits after it are wanted. In sorted order a prompt's longest common prefix is the one with its neighbour.
    """
    ordered = sorted(prompt.tobytes() for prompt in prompts)
    total = 0
    for previous, prompt in zip(ordered, ordered[1:], strict=False):
        total += min(common_tokens(previous, prompt), len(prompt) // _TOKEN_BYTES - 1)
    return total


def common_tokens(a: bytes, b: bytes, position: int = 0) -> int:
    """How many whole tokens a shares with b[position:] from the start on; both are uint32 token ids."""
    low, high = 0, min(len(a), len(b) - position) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if (
            a[low * _TOKEN_BYTES : middle * _TOKEN_BYTES]
            == (b[position + low * _TOKEN_BYTES : position + middle * _TOKEN_BYTES])
        ):
            low = middle
        else:
            high = middle - 1
    return low
