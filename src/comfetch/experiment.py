"""Turn options, from a command line or a TOML file, into a run: what `comfetch run` does."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comfetch import records
from comfetch.data import Task, load_task
from comfetch.errors import OptionError
from comfetch.methods import Comfetch, FedAvg, Local, Method
from comfetch.models import constructor
from comfetch.simulation import History, simulate
from comfetch.transforms import Transform, adaptive, chain, error_feedback, momentum, scale, top_k

METHODS = ("comfetch", "fedavg")
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "hash": "random", "blocks": "1", "scale": "count", "policy": "paper", "optimiser": "adam", "lr": 0.001,
        "batch_size": 128, "keep_optimiser": True, "load_rates": True, "weighting": "uniform",
    },
}  # fmt: skip
"""Options that a preset sets; what the user gives besides goes before it."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Experiment:
    """Every option of a run. The field names are the names in TOML files, and with dashes on the command line."""

    task: str = _option("digits", "Task: a name, file.py or module:function.")
    method: str = _option("comfetch", "Federated method.")
    preset: str = _option("default", "Set of options that others change: default or paper.")
    model: str | None = _option(None, "Model; the task's own if not given.")
    stem: str | None = _option(None, "ResNet-18: imagenet (7x7, as in the paper) or cifar (3x3).")
    norm: str | None = _option(None, "ResNets: batch or group normalisation.")
    compression: float = _option(4.0, "Factor by which each sketched weight shrinks.")
    mode: str = _option("output", "Mode that is sketched: output, input or both.")
    rows: int = _option(1, "Independent sketches of each weight.")
    blocks: str = _option("auto", "Hashes of a weight, one for each block of its other side: auto or a number.")
    hash: str = _option("balanced", "Kind of hash: balanced or random.")
    scale: str = _option("mean", "Scale of the sketch: mean, isometric or count.")
    policy: str = _option("default", "Layers that are sketched: default, all or paper.")
    redraw: int | None = _option(None, "Draw new hashes every so many rounds.")
    clients: int = _option(10, "Number of clients.")
    fraction: float = _option(1.0, "Part of the clients in each round.")
    rounds: int = _option(10, "Number of rounds.")
    partition: str = _option("iid", "How examples are divided: iid, dirichlet, shards or natural.")
    alpha: float = _option(1.0, "Concentration of the Dirichlet partition.")
    unequal: bool = _option(False, "Dirichlet partition with local sets of unequal size.")
    limit: int | None = _option(None, "Use only so many examples of each side.")
    uploads: str = _option("weights", "What clients send: weights, or one gradient a round (Algorithms 1 and 2).")
    local_epochs: int = _option(1, "Passes over the local data in a round.")
    local_steps: int | None = _option(None, "Steps of local training, instead of epochs.")
    batch_size: int = _option(64, "Examples of a step.")
    optimiser: str = _option("adam", "Optimiser of the clients: any of torch's, in lower case.")
    lr: float = _option(0.001, "Learning rate of the clients (of the server, if clients send gradients).")
    momentum: float = _option(0.0, "Momentum of the clients' SGD.")
    weight_decay: float = _option(0.0, "Weight decay of the clients.")
    clip: float | None = _option(None, "Largest norm of a client's gradient.")
    prox: float = _option(0.0, "Weight of the FedProx term.")
    keep_optimiser: bool = _option(False, "Keep each client's optimiser state from round to round.")
    load_rates: bool = _option(False, "Multiply learning rates by the loads of the buckets (the paper's runs).")
    weighting: str = _option("examples", "Average clients by examples or uniform.")
    server_optimiser: str = _option("none", "Adaptive server optimiser: none, adam, yogi or adagrad.")
    server_lr: float | None = _option(None, "Learning rate of the server.")
    server_momentum: float = _option(0.0, "Momentum of the server.")
    factor_masking: bool = _option(False, "Forget the server's momentum where it was applied.")
    top_k: float | None = _option(None, "Fraction of coordinates that the server applies, with error feedback.")
    top_k_per: str = _option("layer", "Choose the top-k of each layer, or global.")
    space: str = _option("full", "Where momentum and error live: full or sketch.")
    key: int = _option(0, "What hashes and the choice of clients are drawn from.")
    seed: int = _option(0, "What data order and initial weights are drawn from.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Experiment":
        """Make an experiment of options; those of the preset come first. Unknown names and wrong types are refused."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name, value in options.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
                raise OptionError(f"Unknown option {name!r}.{hint}")
            _check_type(name, value, str(known[name].type))
        preset = options.get("preset", "default")
        for name, value, names in (
            ("preset", preset, PRESETS), ("method", options.get("method", "comfetch"), METHODS),
        ):  # fmt: skip
            if value not in names:
                raise OptionError(f"{name}={value!r} is not known. Choose one of: {', '.join(names)}.")
        return cls(**{**PRESETS[preset], **options})

    def options(self) -> dict[str, Any]:
        """Return all options, as `run.toml` keeps them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def local(self) -> Local:
        """Return how clients train."""
        settings: dict[str, Any] = {"weight_decay": self.weight_decay} if self.weight_decay else {}
        if self.momentum:
            settings["momentum"] = self.momentum
        return Local(
            self.optimiser, self.lr, self.local_epochs, self.local_steps, self.batch_size, self.clip, self.prox,
            self.keep_optimiser, self.load_rates, settings,
        )  # fmt: skip

    def server(self) -> Transform:
        """Return the server's transforms: momentum, then the rate or an adaptive optimiser, then error feedback."""
        steps: list[Transform] = []
        if self.server_momentum:
            steps.append(momentum(self.server_momentum, masked=self.factor_masking))
        rate = self.server_lr if self.server_lr is not None else self.lr if self.uploads == "gradient" else None
        if self.server_optimiser != "none":
            steps.append(adaptive(self.server_optimiser, **({} if rate is None else {"rate": rate})))
        elif rate is not None:
            steps.append(scale(rate))
        if self.top_k is not None:
            steps.append(error_feedback(top_k(self.top_k, self.top_k_per)))
        return chain(*steps)

    def make_method(self) -> Method:
        """Make the method."""
        if self.method == "fedavg":
            return FedAvg(self.local(), self.server(), self.weighting, self.key)
        blocks = self.blocks if self.blocks == "auto" else _whole("blocks", self.blocks)
        sketch = {
            "mode": self.mode, "rows": self.rows, "blocks": blocks, "hash": self.hash, "scale": self.scale,
            "policy": self.policy,
        }  # fmt: skip
        return Comfetch(
            self.compression, self.key, self.local(), self.server(), self.uploads, self.space, self.redraw,
            self.weighting, sketch,
        )  # fmt: skip

    def load(self, data_dir: str | None = None) -> tuple[Task, Callable[[], Any]]:
        """Load the task and bind the model's constructor to it."""
        task = load_task(self.task, data_dir, limit=self.limit, seed=self.seed)
        model = self.model or task.model
        extras = {name: value for name in ("stem", "norm") if (value := getattr(self, name)) is not None}
        return task, constructor(model, task.inputs, task.classes, **extras) if isinstance(model, str) else model

    def run(
        self, out: Path | None = None, *, data_dir: str | None = None, device: str = "cpu", resume: bool = False,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> History:  # fmt: skip
        """Run the experiment, with its records in `out`."""
        method = self.make_method()
        task, build = self.load(data_dir)
        return simulate(
            method, task, model=build, clients=self.clients, rounds=self.rounds, fraction=self.fraction,
            partition=self.partition, alpha=self.alpha, unequal=self.unequal, seed=self.seed, device=device, out=out,
            resume=resume, options=self.options(), on_round=on_round,
        )  # fmt: skip


def read_experiment(path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
    """Read an experiment from a TOML file; `changes` go before what it says."""
    try:
        return Experiment.of({**records.read_options(path), **(changes or {})})
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


def _check_type(name: str, value: Any, wanted: str) -> None:
    types = {"str": str, "int": int, "float": int | float, "bool": bool}
    kind = types[wanted.split(" ")[0]]
    if (value is None and "None" in wanted) or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return
    raise OptionError(f"{name}={value!r} is not of type {wanted.split(' ')[0]}.")


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"{name}={text!r} is neither 'auto' nor a whole number of at least 1.")
    return int(text)
