"""PowerSGD: gradients as products of two thin matrices, one step of power iteration each, with error feedback.

T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS
2019, algorithms 1 and 2. For a gradient G_r [n, m] of rank r and a factor Q [m, k], equal on all ranks:

    D_r = G_r + E_r                what this rank would send, with what it still owes
    P = orthogonalize(sum_r D_r Q) [n, k]
    Q_r = D_r^T P, Q = sum_r Q_r   [m, k], the next step's factor, too
    sum = P Q^T                    in place of the sum over ranks
    E_r = D_r - P Q_r^T            what it owes now

Torch's hook keeps E_r = D_r - P Q^T / W instead. Both add up to the same, so with fixed ranks both train alike. Ours is what no
rank has applied yet; so with a rank only that is lost, and ranks may have unequal shares. E_r is the rank's own: it is no part of
the state that is copied and saved.
"""

from dataclasses import dataclass

import torch

from regroup.generation.groups import Groups, Part, Pending
from regroup.strategies import PowerSGD

from .gradients import Bucket
from .hooks import launch_sum

_EXACT = (torch.float32, torch.float64)
"""Types that matrices are decomposed in. Gradients of other types are summed as they are."""


@dataclass
class _Sent:
    """One bucket on its way. `matrices` has gradients as [n, m], with what was owed, by index of the parameter. `views` has the
    parts of the bucket that they came from: other memory, if a part is not contiguous."""

    matrices: dict[int, torch.Tensor]
    views: dict[int, torch.Tensor]
    others: list[torch.Tensor]
    flat: torch.Tensor
    """The tensor that is summed: all D_r Q, then the others."""


class LowRank:
    """The hook of hook=PowerSGD(...)."""

    needs_step = True

    def __init__(self, options: PowerSGD) -> None:
        self._options = options
        self._errors: dict[int, torch.Tensor] = {}
        """E_r by index of the parameter. Absent: zero."""
        self._factors: dict[int, torch.Tensor] = {}
        """Q. Absent: it is drawn."""
        self._new: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        """(E_r, Q) once this step is committed."""
        self._sent: list[_Sent] = []
        self._generation = 0

    def begin_generation(self, groups: Groups | None) -> None:
        """Draw Q anew, the same on all ranks: a rank that joins has none, and one that was a commit behind has another. That costs
        one step with a coarser approximation, whose error is fed back."""
        self._factors = {}
        self._generation = groups.generation if groups is not None else 0

    def forget(self) -> None:
        """Owe nothing: the errors belong to a state that this rank no longer has."""
        self._errors = {}

    def begin_step(self) -> None:
        """Drop the errors and factors of a step that was not committed."""
        self._sent, self._new = [], {}

    @torch.no_grad()
    def send(self, groups: Groups | Part, bucket: Bucket, step: int) -> Pending:
        """Start to sum D_r Q of each matrix that is compressed, and all else as it is."""
        if step < self._options.start_step:
            return launch_sum(groups, bucket.flat)
        matrices, views, others, lefts = {}, {}, [], []
        for index, view in zip(bucket.indices, bucket.views):
            if not self.compresses(view):
                others.append(view)
                continue
            views[index] = view
            matrix = matrices[index] = view.reshape(view.shape[0], -1)
            if index in self._errors:
                matrix.add_(self._errors[index])
            lefts.append((matrix @ self._factor(index, matrix)).view(-1))
        if not matrices:
            return launch_sum(groups, bucket.flat)
        flat = torch.cat([*lefts, *(other.reshape(-1) for other in others)])
        self._sent.append(_Sent(matrices, views, others, flat))
        return launch_sum(groups, self._sent[-1].flat)

    @torch.no_grad()
    def finish(self, groups: Groups | Part) -> None:
        """Sum the right factors and leave P Q^T in the buckets. The second round of each bucket overlaps with the first half of the
        next one's."""
        rounds = []
        for sent in self._sent:
            sizes = [self._options.rank * matrix.shape[0] for matrix in sent.matrices.values()]
            parts = torch.split(sent.flat, [*sizes, *(other.numel() for other in sent.others)])
            lefts = [
                torch.linalg.qr(part.view(len(matrix), -1)).Q for part, matrix in zip(parts, sent.matrices.values())
            ]
            for other, part in zip(sent.others, parts[len(sizes) :]):
                other.copy_(part.view(other.shape))
            mine = [matrix.t() @ left for left, matrix in zip(lefts, sent.matrices.values())]
            flat = torch.cat([right.reshape(-1) for right in mine])
            rounds.append((sent, lefts, mine, flat, launch_sum(groups, flat)))
        if rounds:
            groups.wait([pending for *_, pending in rounds])
        for sent, lefts, mine, flat, _ in rounds:
            rights = torch.split(flat, [right.numel() for right in mine])
            for (index, matrix), left, own, right in zip(sent.matrices.items(), lefts, mine, rights):
                factor = right.view_as(own)
                self._new[index] = torch.addmm(matrix, left, own.t(), alpha=-1), factor
                view = sent.views[index]
                if view.is_contiguous():
                    torch.mm(left, factor.t(), out=matrix)
                else:
                    view.copy_((left @ factor.t()).view(view.shape))
        self._sent = []

    @torch.no_grad()
    def alone(self, bucket: Bucket) -> None:
        """Add what is owed: nothing is sent, so nothing is owed any more."""
        for index, view in zip(bucket.indices, bucket.views):
            if index in self._errors:
                view.add_(self._errors[index].view(view.shape))
                self._new[index] = None, None

    def commit(self, used: bytes) -> None:
        """Keep the new errors and factors. A gradient that no rank has used is not applied, so it is still owed."""
        for index, (error, factor) in self._new.items():
            if used[index]:
                _put(self._errors, index, error)
                _put(self._factors, index, factor)
        self._new = {}

    def compresses(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is approximated."""
        if gradient.dim() < 2 or gradient.dtype not in _EXACT or not gradient.numel():
            return False
        n, m = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return (n + m) * self._options.rank * self._options.min_compression < n * m

    def _factor(self, index: int, matrix: torch.Tensor) -> torch.Tensor:
        if index not in self._factors:
            generator = torch.Generator().manual_seed(self._generation << 20 | index)
            drawn = torch.randn(matrix.shape[1], self._options.rank, generator=generator, dtype=matrix.dtype)
            self._factors[index] = drawn.to(matrix.device)
        return self._factors[index]


def _put(where: dict[int, torch.Tensor], index: int, value: torch.Tensor | None) -> None:
    if value is None:
        where.pop(index, None)
    else:
        where[index] = value
