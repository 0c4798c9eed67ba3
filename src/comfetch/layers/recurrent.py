"""Sketched recurrent layers: LSTM, GRU and the plain RNN, with every option of torch's.

The inputs of all time steps are multiplied in one product; only the recurrent part is a loop (`recurrence`). torch's
fused kernels need the full weight_hh, which never exists here, so the loop is one of Python's.

Inside, features come first: a sequence is (features, n), where n counts the entries of all time steps in the order of a
packed sequence, and a state is (features, batch). So neither the products nor the loop transpose anything. A padded
batch is a packed one whose batch sizes are all equal.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from comfetch.errors import MismatchError
from comfetch.layers.base import Product, Recipe, SketchedLayer, register_layer
from comfetch.layers.recurrence import CELLS, Loop, Multiplier, Recurrence, State
from comfetch.plan import Geometry


class SketchedRecurrent(SketchedLayer):
    """A stack of recurrent layers in one or two directions; each weight has its own small product."""

    full: Any
    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    weight_ih_l0: Tensor

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Map (time, batch, inputs), batch first if so set, (time, inputs) or a packed sequence, as torch's layer does.

        Returns:
            The outputs of the last layer, and the final state, (layers · directions, batch, hidden): two for an LSTM.
        """
        initial = hx if hx is None or isinstance(hx, tuple) else (hx,)
        output: Tensor | PackedSequence
        if isinstance(input, PackedSequence):
            output, final = self._packed(input, initial)
        elif input.ndim == 2:
            output, final = self._unbatched(input, initial)
        elif input.ndim == 3:
            output, final = self._padded(input, initial)
        else:
            raise MismatchError(f"{self.mode}: the input has {input.ndim} dimensions; expected 2 or 3.")
        return output, final if self.mode == "LSTM" else final[0]

    def flatten_parameters(self) -> None:
        """Do nothing: models call this before each forward pass, for kernels that are not used here."""

    def _packed(self, input: PackedSequence, initial: State | None) -> tuple[PackedSequence, State]:
        data, batch_sizes, order, back = input
        if initial is not None and order is not None:
            initial = tuple(s.index_select(1, order) for s in initial)
        rows, final = self._run(data.t().contiguous(), batch_sizes.tolist(), initial)
        if back is not None:
            final = tuple(s.index_select(1, back) for s in final)
        return PackedSequence(rows.t().contiguous(), batch_sizes, order, back), final

    def _unbatched(self, x: Tensor, initial: State | None) -> tuple[Tensor, State]:
        """Run over (time, inputs); the state has no batch either."""
        if initial is not None:
            initial = tuple(s.unsqueeze(1) for s in initial)
        rows, final = self._run(x.t().contiguous(), [1] * len(x), initial)
        return rows.t().contiguous(), tuple(s.squeeze(1) for s in final)

    def _padded(self, x: Tensor, initial: State | None) -> tuple[Tensor, State]:
        """Run over (time, batch, inputs), or (batch, time, inputs)."""
        if self.batch_first:
            x = x.transpose(0, 1)
        time, batch, inputs = x.shape
        rows, final = self._run(x.permute(2, 0, 1).reshape(inputs, -1), [batch] * time, initial)
        y = rows.view(len(rows), time, batch)
        return y.permute(2, 1, 0).contiguous() if self.batch_first else y.permute(1, 2, 0).contiguous(), final

    def _run(self, rows: Tensor, sizes: list[int], initial: State | None) -> tuple[Tensor, State]:
        """Run all layers over (inputs, n), of which `sizes` are the entries of each time step."""
        self._check(rows, sizes, initial)
        directions = 2 if self.bidirectional else 1
        if initial is None:
            count = self.num_layers * directions
            initial = tuple(rows.new_zeros(count, sizes[0], width) for width in self._widths())
        states = [tuple(s.t() for s in pair) for pair in zip(*initial, strict=True)]
        finals = []
        for layer in range(self.num_layers):
            if layer > 0:
                rows = F.dropout(rows, self.dropout, self.training)
            outputs = []
            for direction, name in enumerate((f"l{layer}", f"l{layer}_reverse")[:directions]):
                output, final = self._run_one(name, rows, sizes, states[layer * directions + direction])
                outputs.append(output)
                finals.append(final)
            rows = torch.cat(outputs) if self.bidirectional else outputs[0]
        dtype = rows.dtype
        if self.mode == "LSTM" and _autocasts(rows.device.type):  # as torch's own, which is autocast whole
            dtype = torch.get_autocast_dtype(rows.device.type)
        return rows.to(dtype), tuple(torch.stack([s.t() for s in kind]).to(dtype) for kind in zip(*finals, strict=True))

    def _run_one(self, name: str, rows: Tensor, sizes: list[int], initial: State) -> tuple[Tensor, State]:
        """Run one layer in one direction over (inputs, n)."""
        product, weight = self._weight(f"weight_ih_{name}")
        inputs = Multiplier(product, weight)(rows)
        hidden_bias = None
        if self.bias:
            ih, hh = getattr(self, f"bias_ih_{name}"), getattr(self, f"bias_hh_{name}")
            if self.mode == "GRU":  # the reset gate is applied to W h + b of the last third
                hh, hidden_bias = hh.split([2 * self.hidden_size, self.hidden_size])
                hh = F.pad(hh, (0, self.hidden_size))
            inputs = inputs + (ih + hh)[:, None]
        hidden, weight = self._weight(f"weight_hh_{name}")
        projection, projection_weight = self._weight(f"weight_hr_{name}") if self.proj_size else (None, None)
        loop = Loop(CELLS[self.mode], hidden, projection, sizes, name.endswith("_reverse"))
        output, *final = Recurrence.apply(loop, inputs, hidden_bias, weight, projection_weight, *initial)
        return output, tuple(final)

    def _weight(self, name: str) -> tuple[Product, Tensor]:
        """Return a product and its arranged weight, in the precision that autocast asks for."""
        product: Product = self.products[name]  # type: ignore[assignment]
        weight = product.weight(getattr(self, name))[..., 0]
        device = weight.device.type
        if _autocasts(device):
            weight = weight.to(torch.get_autocast_dtype(device))
        return product, weight.contiguous()

    def _widths(self) -> tuple[int, ...]:
        """Return the width of each tensor of the state."""
        if self.mode == "LSTM":
            return self.proj_size or self.hidden_size, self.hidden_size
        return (self.hidden_size,)

    def _check(self, rows: Tensor, sizes: list[int], initial: State | None) -> None:
        problems = []
        dtype = self.weight_ih_l0.dtype
        if rows.dtype != dtype and not _autocasts(rows.device.type):
            problems.append(f"the input is {rows.dtype}, the weights are {dtype}")
        if len(rows) != self.input_size:
            problems.append(f"the input has {len(rows)} features, the layer takes {self.input_size}")
        if not sizes:
            problems.append("the sequence has no time step")
        elif initial is not None:
            count = self.num_layers * (2 if self.bidirectional else 1)
            expected = [(count, sizes[0], width) for width in self._widths()]
            found = [tuple(s.shape) for s in initial]
            if found != expected:
                problems.append(f"the initial state has shapes {found}, expected {expected}")
        if problems:
            raise MismatchError(f"{self.mode}: {'; '.join(problems)}.")


@register_layer(nn.LSTM)
@register_layer(nn.GRU)
@register_layer(nn.RNN)
def recurrent(layer: Any) -> Recipe | str:
    """Describe recurrent layers: each weight is (gates · hidden, inputs), that of a projection (projected, hidden)."""
    weights = {name: Geometry(tuple(p.shape)) for name, p in layer.named_parameters() if p.ndim == 2}
    return Recipe(weights, SketchedRecurrent)


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
