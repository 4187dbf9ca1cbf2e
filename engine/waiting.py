"""The rows that wait, in the order in which they should run: depth first along the prefix tree.

So the sharers of a prefix follow one another, and a prefix is needed for the shortest time. Among the branches of a
prefix the decode-heavy ones come first: the prompts of the prefill-heavy ones then have decodes to ride with.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from engine.prefix import PrefixNode
from engine.sequence import Sequence

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
    rows: defaultdict[PrefixNode | None, list[Sequence]] = defaultdict(list)
    for sequence in sequences:
        rows[sequence.prefix_leaf].append(sequence)
    children, tops = _children_of(rows)
    density = _Densities(rows, children, expected_output)
    ordered: list[Sequence] = []
    stack: list[PrefixNode | None] = sorted(tops, key=density.of_node)
    while stack:
        node = stack.pop()
        ordered += sorted(rows.get(node, ()), key=density.of_row, reverse=True)
        stack += sorted(children.get(node, ()), key=density.of_node)
    return ordered


def _children_of(
    rows: dict[PrefixNode | None, list[Sequence]],
) -> tuple[dict[PrefixNode | None, list[PrefixNode]], list[PrefixNode | None]]:
    """The part of the tree that lies above the rows: each node's children, and the nodes without a parent."""
    children: defaultdict[PrefixNode | None, list[PrefixNode]] = defaultdict(list)
    seen: set[PrefixNode | None] = set()
    tops: list[PrefixNode | None] = []
    for leaf in rows:
        node = leaf
        while node not in seen:
            seen.add(node)
            if node is None or node.parent is None:
                tops.append(node)
                break
            children[node.parent].append(node)
            node = node.parent
    return children, tops


class _Densities:
    """Expected output tokens for each prompt token to compute, of rows and of all rows below a node."""

    def __init__(
        self,
        rows: dict[PrefixNode | None, list[Sequence]],
        children: dict[PrefixNode | None, list[PrefixNode]],
        expected_output: Callable[[Sequence], int],
    ) -> None:
        self._expected_output = expected_output
        self._nodes: dict[PrefixNode | None, float] = {}
        sums: defaultdict[PrefixNode | None, list[int]] = defaultdict(lambda: [0, 0])  # output, prompt
        nodes = {*rows, *children}
        for node in sorted(
            nodes, key=lambda n: -1 if n is None else n.end, reverse=True
        ):  # the deepest first
            total = sums[node]
            for row in rows.get(node, ()):
                total[0] += expected_output(row)
                total[1] += 1 if node is not None else row.num_prompt_tokens
            if node is not None:
                total[1] += node.end - node.filled_end
                if node.parent is not None:
                    sums[node.parent][0] += total[0]
                    sums[node.parent][1] += total[1]
            self._nodes[node] = total[0] / max(1, total[1])

    def of_node(self, node: PrefixNode | None) -> float:
        return self._nodes[node]

    def of_row(self, row: Sequence) -> float:
        return self._expected_output(row) / row.num_prompt_tokens
