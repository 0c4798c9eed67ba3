"""Take the median of several rows, coordinate by coordinate, and its gradient, for one byte a value of memory."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def median(rows: Tensor) -> Tensor:
    """Take the median over dimension 0; for an even number the mean of the two middle values (docs/mathematics.md, 10).

    For its gradient it keeps one byte a value, that of `place_median`.

    >>> median(torch.tensor([[4.0], [1.0], [2.0], [9.0]]))
    tensor([3.])
    """
    k = len(rows)
    if k <= 2:
        return rows.mean(0) if k == 2 else rows[0]
    if torch.compiler.is_compiling() or (rows.requires_grad and torch._C._are_functorch_transforms_active()):
        return rows.sort(dim=0).values[(k - 1) // 2 : k // 2 + 1].mean(0)  # what both can look into
    if rows.requires_grad:
        placed: Tensor = _Median.apply(rows)
        return placed
    ordered = sort_rows(rows.unbind())
    return ordered[k // 2] if k % 2 else (ordered[k // 2 - 1] + ordered[k // 2]) / 2


class _Median(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        value, places = place_median(rows)
        ctx.save_for_backward(places)
        ctx.save_for_forward(places)
        ctx.rows = len(rows)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors  # asked for once: checkpoints allow no more
        return median_gradient(grad, places, ctx.rows)

    @staticmethod
    def jvp(ctx: Any, rows: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return _at_places(rows, places)


def place_median(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the median over dimension 0, of more than two rows, and which row gave it, or which two.

    Equal values count in the order of their rows and NaN as the largest, as in `torch.sort`. The places of the lower
    and the upper middle value are packed into one byte, beyond 16 rows into four.

    >>> place_median(torch.tensor([[4.0, 1.0], [3.0, 3.0], [2.0, 2.0]]))
    (tensor([3., 2.]), tensor([1, 2], dtype=torch.uint8))
    """
    value = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    places = torch.empty_like(value, dtype=torch.uint8 if len(rows) <= 16 else torch.int32)
    for median, place, piece in _pieces(value, places, rows):
        _find_middle(piece, place)
        median.copy_(_at_places(piece, place))
    return value, places


def median_gradient(grad: Tensor, places: Tensor, rows: int) -> Tensor:
    """Pass the gradient of a median to the row in the middle, or half of it to each of two: (rows, …)."""
    back, count = grad.new_zeros(rows, *grad.shape), 2 - rows % 2
    if torch.is_grad_enabled():
        index = _middle(places, rows)
        return back.scatter(0, index, (grad / count).expand(index.shape))
    for share, place, piece in _pieces(grad, places, back):
        index = _middle(place, rows)
        piece.scatter_(0, index, (share / count).expand(index.shape))
    return back


def _find_middle(rows: Tensor, places: Tensor) -> None:
    """Fill in the places of the middle rows: rank[i] counts the rows that a stable sort puts before row i."""
    k = len(rows)
    ranks = [torch.zeros_like(places) for _ in range(k)]
    for i in range(1, k):
        last = rows[i].isnan()
        for j in range(i):
            stays = (rows[j] <= rows[i]).logical_or_(last)
            ranks[i].add_(stays)
            ranks[j].add_(stays.logical_not_())
    places.zero_()
    for middle, shift in zip(range((k - 1) // 2, k // 2 + 1), (0, _width(places)), strict=False):
        for i, rank in enumerate(ranks):
            places.add_(rank == middle, alpha=i << shift)


def _at_places(rows: Tensor, places: Tensor) -> Tensor:
    return rows.gather(0, _middle(places, len(rows))).mean(0)


def _middle(places: Tensor, rows: int) -> Tensor:
    """Unpack the places: (1, …) for an odd number of rows, (2, …) for an even one."""
    width = _width(places)
    low = places & ((1 << width) - 1)
    return (low[None] if rows % 2 else torch.stack((low, places >> width))).long()


def _width(places: Tensor) -> int:
    """Return the bits of one place."""
    return 4 if places.dtype == torch.uint8 else 15


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors that end in the shape of the first along one dimension of it, so that temporaries are small."""
    shape = tensors[0].shape
    count = min(32, shape.numel() // 2**16)
    if count <= 1:
        return iter([tensors])
    dim = max(range(-len(shape), 0), key=lambda d: min(shape[d], count))  # the outermost that is long enough
    return zip(*(tensor.chunk(count, dim) for tensor in tensors), strict=True)


def sort_rows(rows: Sequence[Tensor]) -> list[Tensor]:
    """Sort each coordinate over tensors of one shape, by exchanging minima and maxima of pairs of them.

    For tens of rows this is about ten times as fast as `torch.sort`, which also makes indices of eight bytes.

    >>> torch.stack(sort_rows([torch.tensor([3, 1]), torch.tensor([2, 5]), torch.tensor([1, 9])])).tolist()
    [[1, 1], [2, 5], [3, 9]]
    """
    ordered = list(rows)
    for low, high in _exchanges(len(ordered)):
        a, b = ordered[low], ordered[high]
        ordered[low], ordered[high] = torch.minimum(a, b), torch.maximum(a, b)
    return ordered


@functools.lru_cache(maxsize=8)
def _exchanges(n: int) -> list[tuple[int, int]]:
    """List the pairs of Batcher's odd-even merge sort of n values (Knuth, The Art of Computer Programming, 5.2.2 M)."""
    pairs = []
    merged = 1
    while merged < n:
        gap = merged
        while gap:
            for start in range(gap % merged, n - gap, 2 * gap):
                for low in range(start, min(start + gap, n - gap)):
                    if low // (2 * merged) == (low + gap) // (2 * merged):
                        pairs.append((low, low + gap))
            gap //= 2
        merged *= 2
    return pairs
