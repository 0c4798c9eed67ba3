"""Local training, the same for all methods whose clients run a torch optimiser."""

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comfetch.errors import OptionError
from comfetch.groups import parameter_groups
from comfetch.methods.base import LocalData, State, Trained

UNFIT = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
"""The base; one that calls the model itself; for sparse gradients only; for matrices only."""
OPTIMISERS: dict[str, Any] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in UNFIT
}
FUSED = {"adam", "adamw"}
"""Those that are made to work in one pass over memory: three times as fast on CPUs, with no temporary tensors."""
WAYS = {"fused", "foreach", "differentiable", "capturable"}
"""Settings by which a user says how an optimiser is to compute."""


@dataclass(frozen=True)
class Local:
    """How a client trains.

    Args:
        optimiser: any of torch's, by its name in lower case; settings: its further arguments, such as momentum.
        lr: learning rate. load_rates: multiply it by the loads as `parameter_groups` does (the paper's runs).
        epochs, steps: passes over the local data, or, if given, a number of steps.
        batch_size: examples of a step. clip: largest norm of the gradient, if any.
        prox: μ of FedProx, which adds μ/2 · ‖w − w_received‖² to the loss.
        keep_optimiser: keep the optimiser's state on the client from round to round, instead of a fresh one.
    """

    optimiser: str = "adam"
    lr: float = 0.001
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 64
    clip: float | None = None
    prox: float = 0.0
    keep_optimiser: bool = False
    load_rates: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise OptionError(f"optimiser={self.optimiser!r} is not known. Choose one of: {', '.join(OPTIMISERS)}.")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise OptionError(f"{name}={value!r} is not a number above 0.")
        for name in ("epochs", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise OptionError(f"{name}={value!r} is not a whole number of at least 1.")
        if not 0 <= self.prox < math.inf:
            raise OptionError(f"prox={self.prox!r} is below 0.")
        try:
            OPTIMISERS[self.optimiser]([nn.Parameter(torch.zeros(1))], lr=self.lr, **self.settings)
        except (TypeError, ValueError) as error:
            raise OptionError(f"optimiser {self.optimiser} does not take {dict(self.settings)}: {error}") from error

    def make_optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimiser of a model."""
        parameters = parameter_groups(model, self.lr) if self.load_rates else model.parameters()
        fused = {"fused": True} if self.is_fused and all(map(_can_fuse, model.parameters())) else {}
        made: torch.optim.Optimizer = OPTIMISERS[self.optimiser](parameters, lr=self.lr, **fused, **self.settings)
        return made

    @property
    def is_fused(self) -> bool:
        """Tell whether the optimiser works in one pass, where torch can."""
        return self.optimiser in FUSED and not WAYS & self.settings.keys()


def train_locally(model: nn.Module, data: LocalData, local: Local, memory: State, seed: int) -> Trained:
    """Train a model on a client's data, in place; the state returned refers to the model's tensors."""
    if not model.training:
        model.train()
    optimiser = local.make_optimiser(model)
    if local.keep_optimiser:
        _restore(optimiser, memory)
    received = [p.detach().clone() for p in model.parameters()] if local.prox else []
    losses: list[Tensor] = []
    for inputs, targets in _batches(data, local, seed):
        optimiser.zero_grad()
        loss = data.loss(model(inputs), targets)
        losses.append(loss.detach())
        if local.prox:
            pulls = [(p - old).square().sum() for p, old in zip(model.parameters(), received, strict=True)]
            loss = loss + local.prox / 2 * torch.stack(pulls).sum()
        loss.backward()
        if local.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), local.clip)
        optimiser.step()
    if local.keep_optimiser:
        _keep(optimiser, memory)
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    return Trained(model.state_dict(), math.fsum(map(float, losses)) / len(losses), len(losses))


def one_gradient(model: nn.Module, data: LocalData, local: Local, seed: int) -> Trained:
    """Take the gradient of the loss over `steps` batches, or over all local data (Algorithms 1 and 2)."""
    model.train()
    model.zero_grad()
    losses, seen = [], 0
    for inputs, targets in _batches(data, Local(batch_size=local.batch_size, steps=local.steps), seed):
        loss = data.loss(model(inputs), targets)
        (loss * len(targets)).backward()
        losses.append(loss.detach() * len(targets))
        seen += len(targets)
    state = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            state[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / seen
    model.zero_grad()
    return Trained(state, float(torch.stack(losses).sum()) / seen, len(losses))


def _can_fuse(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")


def _batches(data: LocalData, local: Local, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Go over the data for the epochs asked for, or as often as the steps need."""
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    if local.steps is None:
        for _ in range(local.epochs):
            yield from data.batches(local.batch_size, generator)
        return
    endless = (batch for _ in itertools.count() for batch in data.batches(local.batch_size, generator))
    yield from itertools.islice(endless, local.steps)


def _restore(optimiser: torch.optim.Optimizer, memory: State) -> None:
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    for i, parameter in enumerate(parameters):
        prefix = f"optimiser.{i}."
        kept = {name.removeprefix(prefix): t.clone() for name, t in memory.items() if name.startswith(prefix)}
        if kept:
            optimiser.state[parameter] = kept


def _keep(optimiser: torch.optim.Optimizer, memory: State) -> None:
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    for i, parameter in enumerate(parameters):
        for name, value in optimiser.state[parameter].items():
            memory[f"optimiser.{i}.{name}"] = torch.as_tensor(value)
