"""Labels of several tokens as a tree, so that one pass scores them all.

The probability of a label is the product, along its path in the trie of label tokens, of the softmax
restricted to the children of each node. A node with a single child decides nothing and is not read. "End" is
a child only where another label goes on (`New`, `New York`).

    root -- New -- (end)           nodes read: the root, and "New"
         |      `- York            runs: "New" (behind the question, in the same pass)
         `- Boston
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Branch:
    """Tokens to run behind the question or behind another branch; read at the last.

    Attributes:
        ids: the tokens; at least one.
        parent: index of the branch in front, -1 for the question itself.
    """

    ids: Int32s
    parent: int


@dataclass(frozen=True, eq=False)
class LabelTree:
    """The labels of a call.

    Attributes:
        branches: what to run behind the question; a parent precedes its children.
        children: for the question's last row, then for each branch: the vocabulary rows of its children.
        paths: for each label the (place in `children`, child) pairs that its probability multiplies.
    """

    branches: tuple[Branch, ...]
    children: tuple[Int64s, ...]
    paths: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def build(cls, labels: Sequence[Sequence[int]], end_id: int) -> LabelTree:
        """Builds the tree of token sequences; all distinct and none empty.

        >>> tree = LabelTree.build([[5], [5, 6], [7]], end_id=0)
        >>> [branch.ids.tolist() for branch in tree.branches], [ids.tolist() for ids in tree.children]
        ([[5]], [[5, 7], [0, 6]])
        """
        assert len({tuple(label) for label in labels}) == len(labels), "labels of the same tokens"
        root = _Node()
        for index, label in enumerate(labels):
            node = root
            for token in label:
                node = node.children.setdefault(int(token), _Node())
            node.label = index
        builder = _Builder(end_id, len(labels))
        builder.visit(root, (), -1, ())
        return cls(
            tuple(builder.branches),
            tuple(np.array(ids, dtype=np.int64) for ids in builder.children),
            tuple(builder.paths),
        )

    @property
    def num_tokens(self) -> int:
        """Rows that a request runs for the tree, beside its question."""
        return sum(len(branch.ids) for branch in self.branches)

    def log_probabilities(self, logits: Sequence[Float32s]) -> Float32s:
        """Log-probabilities of the labels.

        Args:
            logits: for each entry of `children` the (r, children) float32 logits.

        Returns:
            (r, labels) float32; NaN where logits are not finite.
        """
        with np.errstate(invalid="ignore"):
            steps = [_log_softmax(each) for each in logits]
        found = np.zeros((len(logits[0]), len(self.paths)), dtype=np.float32)
        for label, path in enumerate(self.paths):
            for place, child in path:
                found[:, label] += steps[place][:, child]
        return found


def _log_softmax(logits: Float32s) -> Float32s:
    if not logits.shape[1]:
        return logits  # the question's own row, where all labels begin with one token
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Float32s = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float32))
    return found


@dataclass(eq=False)
class _Node:
    children: dict[int, _Node] = field(default_factory=dict)
    label: int | None = None


class _Builder:
    """Walks the trie: read nodes become branches, chains of single children become their ids."""

    def __init__(self, end_id: int, num_labels: int) -> None:
        self.end_id = end_id
        self.branches: list[Branch] = []
        self.children: list[list[int]] = []
        self.paths: list[tuple[tuple[int, int], ...]] = [()] * num_labels
        self.children.append([])

    def visit(
        self, node: _Node, run: tuple[int, ...], parent: int, path: tuple[tuple[int, int], ...]
    ) -> None:
        """Visits a node: `run` are the tokens since the branch `parent`, `path` the choices so far."""
        num_choices = len(node.children) + (node.label is not None and bool(node.children))
        if not node.children:
            assert node.label is not None
            self.paths[node.label] = path
            return
        if num_choices == 1:
            token, child = next(iter(node.children.items()))
            self.visit(child, (*run, token), parent, path)
            return
        place = 0
        if run:
            self.branches.append(Branch(np.array(run, dtype=np.int32), parent))
            self.children.append([])
            place = len(self.branches)
            parent = place - 1
        choices = self.children[place]
        if node.label is not None:
            self.paths[node.label] = (*path, (place, 0))
            choices.append(self.end_id)
        for token, child in node.children.items():
            choices.append(token)
            self.visit(child, (token,), parent, (*path, (place, len(choices) - 1)))
