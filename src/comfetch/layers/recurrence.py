"""Loop over time with a sketched recurrent weight, forward and backward.

The gradient is written by hand: autograd would keep more of each time step, and spend its time on cutting and joining
gates. Features come first: a sequence is (features, n), with n as in a packed sequence, and a state (features, batch).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comfetch import medians
from comfetch.layers.base import Product

State = tuple[Tensor, ...]

tanh_back = torch.ops.aten.tanh_backward
tanh_back_into = torch.ops.aten.tanh_backward.grad_input
sigmoid_back_into = torch.ops.aten.sigmoid_backward.grad_input


class Cell(Protocol):
    """One time step of a recurrent layer, and its gradient."""

    def step(self, inputs: Tensor, hidden: Tensor, bias: Tensor | None, state: State) -> tuple[State, State]:
        """Return the new state, and what `back` needs; `hidden`, which is Ŵ h', may be overwritten."""

    def back(self, kept: Sequence[Tensor], grads: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Return the gradients of inputs, hidden, h' (but for the way through `hidden`) and the rest of the state."""


class LSTMCell:
    """c = f c' + i g and h = o tanh(c), with i, f, o = σ(…) and g = tanh(…) of inputs + Ŵ h'."""

    def step(self, inputs: Tensor, hidden: Tensor, bias: Tensor | None, state: State) -> tuple[State, State]:
        gates = hidden.add_(inputs)
        i, f, g, o = gates.chunk(4)
        gates[: 2 * len(i)].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        c = (f * state[1]).addcmul_(i, g)
        squashed = c.tanh()
        return (o * squashed, c), (gates, state[1], squashed)

    def back(self, kept: Sequence[Tensor], grads: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        gates, c, squashed = kept
        i, f, g, o = gates.chunk(4)
        grad_h, grad_c = grads
        grad_c = tanh_back(grad_h * o, squashed).add_(grad_c)
        grad = torch.empty_like(gates)
        parts = grad.chunk(4)
        sigmoid_back_into(grad_c * g, i, grad_input=parts[0])
        sigmoid_back_into(grad_c * c, f, grad_input=parts[1])
        tanh_back_into(grad_c * i, g, grad_input=parts[2])
        sigmoid_back_into(grad_h * squashed, o, grad_input=parts[3])
        return grad, grad, None, (grad_c.mul_(f),)


class GRUCell:
    """h = (1 - z) n + z h', with r, z = σ(inputs + Ŵ h') and n = tanh(inputs + r (Ŵ h' + b))."""

    def step(self, inputs: Tensor, hidden: Tensor, bias: Tensor | None, state: State) -> tuple[State, State]:
        size = len(hidden) // 3
        gates, new = hidden[: 2 * size], hidden[2 * size :]
        gates.add_(inputs[: 2 * size]).sigmoid_()
        if bias is not None:
            new.add_(bias[:, None])
        n = torch.addcmul(inputs[2 * size :], gates[:size], new).tanh_()
        return (torch.lerp(n, state[0], gates[size:]),), (hidden, n, state[0])

    def back(self, kept: Sequence[Tensor], grads: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        hidden, n, h = kept
        r, z, new = hidden.chunk(3)
        (grad,) = grads
        grad_inputs = torch.empty_like(hidden)
        grad_r, grad_z, grad_n = grad_inputs.chunk(3)
        direct = grad * z
        tanh_back_into(grad - direct, n, grad_input=grad_n)
        sigmoid_back_into((h - n).mul_(grad), z, grad_input=grad_z)
        sigmoid_back_into(grad_n * new, r, grad_input=grad_r)
        grad_hidden = grad_inputs.clone()
        grad_hidden[2 * len(n) :].mul_(r)
        return grad_inputs, grad_hidden, direct, ()


class PlainCell:
    """h = tanh(inputs + Ŵ h'), or relu instead of tanh."""

    def __init__(self, relu: bool) -> None:
        self.relu = relu

    def step(self, inputs: Tensor, hidden: Tensor, bias: Tensor | None, state: State) -> tuple[State, State]:
        hidden.add_(inputs)
        h = hidden.relu_() if self.relu else hidden.tanh_()
        return (h,), (h,)

    def back(self, kept: Sequence[Tensor], grads: State) -> tuple[Tensor, Tensor, Tensor | None, State]:
        grad = grads[0] * (kept[0] > 0) if self.relu else tanh_back(grads[0], kept[0])
        return grad, grad, None, ()


CELLS: dict[str, Cell] = {
    "LSTM": LSTMCell(), "GRU": GRUCell(), "RNN_TANH": PlainCell(relu=False), "RNN_RELU": PlainCell(relu=True),
}  # fmt: skip


class Multiplier:
    """Multiply with one arranged small weight many times, y = E₁ S E₂ᵀ x, and go back without autograd."""

    def __init__(self, product: Product, weight: Tensor) -> None:
        self.product, self.weight = product, weight
        self.weight_grad: Tensor | None = None

    @classmethod
    def optional(cls, product: Product | None, weight: Tensor | None) -> "Multiplier | None":
        """Make a multiplier, if there is a weight."""
        return None if product is None or weight is None else cls(product, weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Return y, (outputs, n)."""
        return self.product.finish(self._multiply(x)).to(x.dtype)

    def placed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return y; and the places of its median, which `back` needs, if there are more than two rows."""
        if self.product.plan.rows <= 2:
            return self(x), None
        y, places = medians.place_median(self.product.estimates(self._multiply(x)))
        return y.flatten(0, -2).to(x.dtype), places

    def back(self, grad: Tensor, x: Tensor, places: Tensor | None) -> Tensor:
        """Return the gradient of x, and add ∂z xᵀ to that of the weight."""
        product, grad = self.product, grad.to(self.weight.dtype)
        if product.plan.rows > 1:
            grad = _estimates_back(product, grad, places)
        if product.after is not None:
            grad = product.after.transposed(grad)
        grad = grad.unflatten(0, (product.parts, -1))
        self._add(torch.bmm(grad, self._slices(x).transpose(1, 2)))
        back = torch.bmm(self.weight.transpose(1, 2), grad).flatten(0, 1)
        return (back if product.before is None else product.before.transposed(back)).to(x.dtype)

    def _add(self, grad: Tensor) -> None:
        if self.weight_grad is None:  # the sum of many steps needs more than half precision
            self.weight_grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        else:
            self.weight_grad.add_(grad)

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.bmm(self.weight, self._slices(x)).flatten(0, 1)

    def _slices(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if self.product.before is not None:
            x = self.product.before(x)
        slices: Tensor = x.unflatten(0, (self.product.parts, -1))
        return slices


def _estimates_back(product: Product, grad: Tensor, places: Tensor | None) -> Tensor:
    """Return the gradient of all rows, (… · outputs, n), but for their expansion, from that of their median."""
    k = product.plan.rows
    if product.after is None:
        grad = grad.unflatten(0, (product.parts // k, -1))
    rows = (grad / k).expand(k, *grad.shape) if places is None else medians.median_gradient(grad, places, k)
    return rows.flatten(0, 1) if product.after is not None else rows.transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class Loop:
    """What the recurrence of one layer in one direction is made of, but for its tensors."""

    cell: "Cell"
    hidden: Product
    projection: Product | None
    sizes: list[int]
    reverse: bool

    @property
    def order(self) -> range:
        """Time steps in the order of the loop."""
        return range(len(self.sizes))[:: -1 if self.reverse else 1]


class Recurrence(torch.autograd.Function):
    """Loop over time: state = cell(inputs, Ŵ state), with inputs of shape (gates · hidden, n)."""

    @staticmethod
    def forward(
        ctx: Any, loop: Loop, inputs: Tensor, bias: Tensor | None, weight: Tensor, projection: Tensor | None,
        *initial: Tensor,
    ) -> State:  # fmt: skip
        """Return the outputs, (hidden, n), and the final state."""
        hidden, project = Multiplier(loop.hidden, weight), Multiplier.optional(loop.projection, projection)
        steps = inputs.split(loop.sizes, dim=1)
        outputs: dict[int, Tensor] = {}
        saved: dict[int, tuple[Tensor | None, ...]] = {}
        ended: list[State] = []
        state = _fit(initial, initial, loop.sizes[loop.order[0]], [])
        for t in loop.order:
            state = _fit(state, initial, loop.sizes[t], ended)
            before = state[0]
            product, places = hidden.placed(before)
            state, kept = loop.cell.step(steps[t], product, bias, state)
            raw = projected = None
            if project is not None:
                raw = state[0]
                product, projected = project.placed(raw)
                state = (product, *state[1:])
            outputs[t] = state[0]
            saved[t] = (before, places, raw, projected, *kept)
        ctx.loop = loop
        ctx.save_for_backward(weight, projection, *(x for t in range(len(saved)) for x in saved[t]))
        return torch.cat([outputs[t] for t in range(len(outputs))], dim=1), *_join(state, ended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *grad_final: Tensor) -> tuple[Any, ...]:
        """Go back through time."""
        loop: Loop = ctx.loop
        weight, projection, *flat = ctx.saved_tensors
        hidden, project = Multiplier(loop.hidden, weight), Multiplier.optional(loop.projection, projection)
        each = len(flat) // len(loop.sizes)
        grad_outputs = grad_output.split(loop.sizes, dim=1)
        grad_inputs: dict[int, Tensor] = {}
        bias_grads: list[Tensor] = []
        ended: list[State] = []
        order = loop.order[::-1]
        grads = _fit(grad_final, grad_final, loop.sizes[order[0]], [])
        for t in order:
            grads = _fit(grads, grad_final, loop.sizes[t], ended)
            before, places, raw, projected, *kept = flat[each * t : each * (t + 1)]
            h = grads[0] + grad_outputs[t]
            if project is not None:
                h = project.back(h, raw, projected)
            grad_inputs[t], grad_hidden, direct, rest = loop.cell.back(kept, (h, *grads[1:]))
            if ctx.needs_input_grad[2]:
                bias_grads.append(grad_hidden[-len(h) :].sum(1))
            through = hidden.back(grad_hidden, before, places)
            grads = (through if direct is None else direct.add_(through), *rest)
        return (
            None,
            torch.cat([grad_inputs[t] for t in range(len(grad_inputs))], dim=1),
            torch.stack(bias_grads).sum(0) if bias_grads else None,
            hidden.weight_grad,
            None if project is None else project.weight_grad,
            *_join(grads, ended),
        )


def _fit(state: State, reserve: State, size: int, ended: list[State]) -> State:
    """Bring a state to the batch size of a step: take new sequences from `reserve`, put those that end into `ended`.

    Backwards through time the same holds for gradients, with the final ones in reserve.
    """
    now = state[0].shape[1]
    if size < now:
        ended.append(tuple(s[:, size:] for s in state))
        return tuple(s[:, :size] for s in state)
    if size > now:
        return tuple(torch.cat([s, r[:, now:size]], dim=1) for s, r in zip(state, reserve, strict=True))
    return state


def _join(state: State, ended: list[State]) -> State:
    """Bring the sequences that ended behind those that run."""
    return tuple(torch.cat(parts, dim=1) for parts in zip(state, *reversed(ended), strict=True))
