"""The rows that wait, in the order in which they should run: depth first along the prefix tree.

So the sharers of a prefix follow one another, and a prefix is needed for the shortest time. Among the branches of a
prefix the decode-heavy ones come first: the prompts of the prefill-heavy ones then have decodes to ride with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from gristmill.engine.batch.prefix_node import PrefixNode
from gristmill.engine.batch.sequence import Sequence

_MERGE_SHARE = 4  # newcomers are merged once they are a quarter of those in order


class WaitingRows:
    """A queue of sequences. expected_output: tokens that a sequence will still generate, by present knowledge."""

    def __init__(self, expected_output: Callable[[Sequence], int], in_arrival_order: bool = False) -> None:
        self._expected_output = expected_output
        self._in_arrival_order = in_arrival_order
        self._ordered: deque[Sequence] = deque()
        self._newcomers: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._ordered) + len(self._newcomers)

    def __iter__(self) -> Iterable[Sequence]:
        yield from self._ordered
        yield from self._newcomers

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Rows that may run in any order."""
        self._newcomers += sequences

    def pop(self) -> Sequence:
        """The row to run next."""
        if len(self._newcomers) * _MERGE_SHARE >= max(1, len(self._ordered)):
            self._merge()
        return self._ordered.popleft()

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Rows that are to run before all others, in this order."""
        self._ordered.extendleft(reversed(list(sequences)))

    def remove(self, sequence: Sequence) -> None:
        """A row that shall not run."""
        if sequence in self._newcomers:
            self._newcomers.remove(sequence)
        else:
            self._ordered.remove(sequence)

    def _merge(self) -> None:
        rows = [*self._ordered, *self._newcomers]
        self._ordered = deque(rows if self._in_arrival_order else plan_order(rows, self._expected_output))
        self._newcomers = []


def plan_order(sequences: list[Sequence], expected_output: Callable[[Sequence], int]) -> list[Sequence]:
    """Depth first along the prefix tree, branches with more output for their missing prompt tokens first.

    Linear in the rows and in the tree's nodes above them, but for sorting each node's branches.
    """
    top = _Branch(None)
    branches: dict[PrefixNode | None, _Branch] = {}
    for sequence in sequences:
        branch = branches.get(sequence.prefix_leaf)
        if branch is None:
            branch = _grow(branches, top, sequence.prefix_leaf)
        branch.rows.append(sequence)
    walk: list[_Branch] = []
    stack = [top]
    while stack:
        branch = stack.pop()
        walk.append(branch)
        stack += branch.branches
    for branch in reversed(walk):  # what grows out of a branch comes before it
        branch.add_up(expected_output)
    ordered: list[Sequence] = []
    stack = [top]
    while stack:
        branch = stack.pop()
        ordered += branch.rows
        stack += branch.branches
    return ordered


class _Branch:
    """A node of the tree: the rows that end there, and the branches of those that go on."""

    __slots__ = ("branches", "density", "node", "num_output", "num_prompt", "rows")

    def __init__(self, node: PrefixNode | None) -> None:
        self.node = node
        self.rows: list[Sequence] = []
        self.branches: list[_Branch] = []
        self.num_output = self.num_prompt = 0  # tokens that are expected, and to compute, here and further on
        self.density = 0.0

    def add_up(self, expected_output: Callable[[Sequence], int]) -> None:
        """Sums over rows and branches, and puts both in order: rows as they run, branches the other way round."""
        node = self.node
        if node is not None:
            self.num_prompt = node.end - node.filled_end + len(self.rows)
        else:
            self.num_prompt = sum(row.num_prompt_tokens for row in self.rows)
        for row in self.rows:
            self.num_output += expected_output(row)
        for branch in self.branches:
            self.num_output += branch.num_output
            self.num_prompt += branch.num_prompt
        self.density = self.num_output / max(1, self.num_prompt)
        if len(self.rows) > 1:
            self.rows.sort(key=lambda row: expected_output(row) / row.num_prompt_tokens, reverse=True)
        self.branches.sort(key=_density)


_density = attrgetter("density")


def _grow(branches: dict[PrefixNode | None, _Branch], top: _Branch, node: PrefixNode | None) -> _Branch:
    """The node's branch, new, on those above it, as far as they are new too."""
    grown = branch = branches[node] = _Branch(node)
    while branch.node is not None and branch.node.parent is not None:
        parent = branches.get(branch.node.parent)
        if parent is not None:
            parent.branches.append(branch)
            return grown
        parent = branches[branch.node.parent] = _Branch(branch.node.parent)
        parent.branches.append(branch)
        branch = parent
    top.branches.append(branch)
    return grown
