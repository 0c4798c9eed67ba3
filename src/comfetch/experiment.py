"""Turn options, from a command line or a TOML file, into a run: what `comfetch run` does."""

import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comfetch import hashing, records
from comfetch.capacity import parse_capacities
from comfetch.data import KINDS, Task, load_task
from comfetch.driver import Channel, Record
from comfetch.errors import ModelError, OptionError
from comfetch.federation import Federation
from comfetch.footprint import meta_model
from comfetch.methods import METHODS, Local, Method, Server
from comfetch.methods.averaging import RULES, STATISTICS, WEIGHTINGS, Averaging
from comfetch.methods.comfetch import SPACES, UPLOADS
from comfetch.methods.local import OPTIMISERS
from comfetch.models import INITS, MODELS, NORMS, STEMS, constructor
from comfetch.plan import MODES
from comfetch.privacy import PLACES, Privacy
from comfetch.settings import POLICIES
from comfetch.simulation import EVALUATIONS, Engine, History, simulate
from comfetch.sketching import SCALES
from comfetch.transforms import SECOND_MOMENTS, Transform, adaptive, chain, error_feedback, momentum, scale, top_k
from comfetch.wire import FORMATS, Wire

PRESETS: dict[str, dict[str, Any]] = {
    "default": {"server_momentum": 0.3, "spread": 0.5},
    "paper": {
        "hash": "random", "blocks": "1", "scale": "count", "policy": "paper", "optimiser": "adam", "lr": 0.001,
        "batch_size": 128, "keep_optimiser": True, "load_rates": True, "weighting": "uniform",
    },
}  # fmt: skip
"""Options that a preset sets; what the user gives besides goes before it. Momentum is for averages of trained weights:
where clients send gradients, or the server has an optimiser, it is left to the user; a method with a server rule of its
own has none."""
FOR_SKETCHES: dict[str, dict[str, Any]] = {"default": {"blocks": "4"}, "paper": {}}
"""Options that a preset sets besides, where the method sketches and all clients are of one size."""
HEEDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("server_momentum", "server_optimiser", "factor_masking", "top_k"), ("server",)),
    **dict.fromkeys(("mode", "rows", "blocks", "hash", "scale", "spread"), ("sketch",)), "policy": ("sketch", "policy"),
    **{name: (name,) for name in ("uploads", "redraw", "space", "capacities")}, "server_lr": ("server", "rate"),
}  # fmt: skip
"""Options that are refused where a method would not heed them, with the fields of a method of which it needs one."""
NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "alpha": ("partition", ("dirichlet", "dirichlet-capped")), "unequal": ("partition", ("dirichlet",)),
    "trim": ("aggregation", ("trimmed-mean",)), "top_k_per": ("top_k", ()), "factor_masking": ("server_momentum", ()),
    **dict.fromkeys(("privacy_clip", "privacy_noise", "privacy_delta"), ("privacy", PLACES[1:])),
}  # fmt: skip
"""Options that are refused without another one, with the values that it needs: any but 0 and none, if not said."""

LARGEST = 1e30
"""Floating point options beyond it are no choice: weights have 32 bits."""
TASK, SKETCH, FEDERATION, CLIENTS, SERVER, WIRE, DRAWS = (
    "Task and model", "Sketch", "Federation", "Local training", "Server", "Wire and privacy", "Random numbers",
)  # fmt: skip
"""Groups of options, as the help shows them."""


def _option(default: Any, group: str, help: str, choices: Iterable[str] = ()) -> Any:
    """Describe an option once, for TOML files and command lines alike."""
    return field(default=default, metadata={"help": help, "group": group, "choices": tuple(choices)})


@dataclass(frozen=True)
class Experiment:
    """Every option of a run. The field names are the names in TOML files, and with dashes on the command line."""

    task: str = _option("digits", TASK, "Task: a name, file.py or module:function.")
    model: str | None = _option(None, TASK, "Model; the task's own if not given.", MODELS)
    stem: str | None = _option(None, TASK, "First convolution of ResNet-18: 7x7 as in the paper, or 3x3.", STEMS)
    norm: str | None = _option(None, TASK, "Normalisation of ResNets.", NORMS)
    init: str | None = _option(None, TASK, "How the initial convolutions of ResNets are drawn.", INITS)
    limit: int | None = _option(None, TASK, "Use only so many examples of each side.")
    method: str = _option("comfetch", TASK, "Federated method.", METHODS)
    method_options: str | None = _option(
        None, TASK, "Options of the method itself, as in TOML: 'fraction = 0.01, changes = true'."
    )
    preset: str = _option("default", TASK, "Set of options to start from; those given besides win.", PRESETS)
    compression: float = _option(4.0, SKETCH, "Factor by which each sketched weight shrinks.")
    mode: str = _option("output", SKETCH, "Side of a weight that is sketched.", MODES)
    rows: int = _option(1, SKETCH, "Independent sketches of each weight.")
    blocks: str = _option(
        "auto", SKETCH, "Hashes of a weight, one a block of its other side: a number, or auto, as many "
        "as the layer is compressed; the default preset's is 4, or auto with capacities."
    )  # fmt: skip
    hash: str = _option("balanced", SKETCH, "Kind of hash.", hashing.KINDS)
    scale: str = _option("mean", SKETCH, "Scale of the sketch.", SCALES)
    policy: str = _option("default", SKETCH, "Which layers are sketched.", POLICIES)
    spread: float = _option(
        0.0, SKETCH, "How much harder large layers are compressed: by a factor as their size to this power (0 to 1); "
        "the default preset's is 0.5, or 0 with capacities.",
    )  # fmt: skip
    redraw: int | None = _option(None, SKETCH, "Draw new hashes every so many rounds.")
    uploads: str = _option("weights", SKETCH, "What clients send; one gradient a round is Algorithms 1, 2.", UPLOADS)
    space: str = _option("full", SKETCH, "Where the server's momentum and error live.", SPACES)
    capacities: str | None = _option(
        None, SKETCH, "Compressions of classes of clients, such as 1,2,4,8; clients take them in turn."
    )
    clients: int = _option(10, FEDERATION, "Number of clients.")
    fraction: float = _option(1.0, FEDERATION, "Part of the clients in each round.")
    rounds: int = _option(10, FEDERATION, "Number of rounds.")
    partition: str = _option("iid", FEDERATION, "How examples are divided.", KINDS)
    alpha: float = _option(1.0, FEDERATION, "Concentration of the Dirichlet partition: small means skewed.")
    unequal: bool = _option(False, FEDERATION, "Dirichlet partition with local sets of unequal size.")
    weighting: str = _option("examples", FEDERATION, "Weight of a client in the average.", WEIGHTINGS)
    statistics: str | None = _option(
        None, FEDERATION, "Running statistics of batch norm in tests: averaged, or taken anew from clients' examples.",
        STATISTICS,
    )  # fmt: skip
    evaluation: str = _option("server", FEDERATION, "Where models are tested.", EVALUATIONS)
    validation: float | None = _option(
        None, FEDERATION, "Part of the training examples to hold out and test on; the test set is then not touched."
    )
    equal: str | None = _option(
        None, FEDERATION, "What the run was sized to, as compare --equal notes it; it changes nothing."
    )
    local_epochs: int = _option(1, CLIENTS, "Passes over the local data in a round.")
    local_steps: int | None = _option(None, CLIENTS, "Steps of local training, instead of epochs.")
    batch_size: int = _option(64, CLIENTS, "Examples of a step.")
    optimiser: str = _option("adam", CLIENTS, "Optimiser of torch.", OPTIMISERS)
    lr: float = _option(0.001, CLIENTS, "Learning rate (of the server, if clients send gradients).")
    momentum: float = _option(0.0, CLIENTS, "Momentum of SGD.")
    weight_decay: float = _option(0.0, CLIENTS, "Weight decay.")
    clip: float | None = _option(None, CLIENTS, "Largest norm of a gradient.")
    prox: float = _option(0.0, CLIENTS, "Weight of the FedProx term.")
    keep_optimiser: bool = _option(False, CLIENTS, "Keep each client's optimiser state from round to round.")
    load_rates: bool = _option(False, CLIENTS, "Multiply learning rates by the loads of the buckets (the paper's).")
    server_optimiser: str = _option("none", SERVER, "Adaptive optimiser.", ("none", *SECOND_MOMENTS))
    server_lr: float | None = _option(None, SERVER, "Learning rate.")
    server_momentum: float = _option(0.0, SERVER, "Momentum; the default preset's is 0.3.")
    factor_masking: bool = _option(False, SERVER, "Forget the momentum where it was applied.")
    top_k: float | None = _option(None, SERVER, "Fraction of coordinates that is applied, with error feedback.")
    top_k_per: str = _option("layer", SERVER, "Where the top-k are chosen.", ("layer", "global"))
    aggregation: str = _option("mean", SERVER, "How uploads become one, coordinate by coordinate.", RULES)
    trim: float = _option(0.1, SERVER, "Part of the clients that trimmed-mean leaves out at each end.")
    clip_updates: float | None = _option(None, SERVER, "Largest norm of a client's change; larger ones are scaled.")
    wire_down: str = _option("float32", WIRE, "Format on the way to clients.", FORMATS)
    wire_up: str = _option("float32", WIRE, "Format on the way back; others than float32 send the change.", FORMATS)
    wire_feedback: bool = _option(False, WIRE, "Clients add what the format lost to their next change.")
    privacy: str = _option("none", WIRE, "Differential privacy: noise on each client, or on the server.", PLACES)
    privacy_clip: float = _option(1.0, WIRE, "Largest norm of a client's change under privacy.")
    privacy_noise: float = _option(1.0, WIRE, "Standard deviation of the noise, in units of privacy-clip.")
    privacy_delta: float = _option(1e-5, WIRE, "The δ for which the privacy loss ε is told.")
    key: int = _option(0, DRAWS, "What hashes and the choice of clients are drawn from.")
    seed: int = _option(0, DRAWS, "What data order and initial weights are drawn from.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Experiment":
        """Make an experiment of options; those of the preset come first. Unknown names and wrong types are refused."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name, value in options.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
                raise OptionError(f"Unknown option {name!r}.{hint}")
            _check_type(name, value, known[name].type)
            choices = known[name].metadata["choices"]
            if choices and value is not None and value not in choices:
                raise OptionError(f"{name}={value!r} is not known. Choose one of: {', '.join(choices)}.")
        if not 0 <= options.get("seed", 0) < 2**63:
            raise OptionError(f"seed={options['seed']} is not a whole number from 0 to 2^63 - 1.")
        method = options.get("method", known["method"].default)
        named = options.get("preset", "default")
        alike = options.get("capacities") is None
        preset = {**PRESETS[named], **(FOR_SKETCHES[named] if alike and heeds(method, "blocks") else {})}
        adaptive_server = options.get("server_optimiser", "none") != "none"
        if adaptive_server or options.get("uploads") == "gradient" or not heeds(method, "server_momentum"):
            preset.pop("server_momentum", None)
        if not alike:  # the largest classes would exceed the smallest layers
            preset.pop("spread", None)
        usual = {name: (known[name].default, preset.get(name, known[name].default)) for name in options}
        chosen = {name: value for name, value in options.items() if value not in usual[name]}
        _check_heeded(method, {name: chosen[name] for name in HEEDED if name in chosen})
        made = cls(**{**preset, **options})
        _check_needs(made, chosen)
        return made

    def options(self) -> dict[str, Any]:
        """Return all options, as `run.toml` keeps them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def folder_name(self) -> str:
        """Name the run: what it is, and a hash of all options but the rounds, to which a run may be extended."""
        told = {name: value for name, value in self.options().items() if name != "rounds"}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        task = re.sub(r"[^A-Za-z0-9]+", "-", self.task.removesuffix(".py")).strip("-")
        return f"{task}-{self.method}-{self.compression if is_compressed(self.method) else 1:g}-{digest[:6]}"

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
        rate = self.server_rate()
        if self.server_optimiser != "none":
            steps.append(adaptive(self.server_optimiser) if rate is None else adaptive(self.server_optimiser, rate))
        elif rate is not None:
            steps.append(scale(rate))
        if self.top_k is not None:
            steps.append(error_feedback(top_k(self.top_k, self.top_k_per)))
        return chain(*steps)

    def server_rate(self) -> float | None:
        """Return the server's learning rate: as given, or that of clients who send gradients, or none."""
        return self.server_lr if self.server_lr is not None else self.lr if self.uploads == "gradient" else None

    def make_method(self) -> Method:
        """Make the method."""
        kind = METHODS[self.method]
        known = {f.name for f in dataclasses.fields(kind)}
        rate = None if "server" in known else self.server_rate()  # the server's transforms have it already
        given = {
            "compression": self.compression, "key": self.key, "local": self.local(), "server": self.server(),
            "uploads": self.uploads, "space": self.space, "redraw": self.redraw, "sketch": self.sketch(),
            "averaging": Averaging(self.weighting, self.aggregation, self.trim, self.statistics), "policy": self.policy,
            "capacities": None if self.capacities is None else parse_capacities(self.capacities),
            "rate": 1.0 if rate is None else rate,
        }  # fmt: skip
        own = read_method_options(self.method_options or "")
        if unknown := own.keys() - known:
            raise OptionError(
                f"method_options: {self.method} has no {', '.join(sorted(unknown))}. It has: "
                f"{', '.join(sorted(known - given.keys() - {'name'})) or 'none of its own'}."
            )
        made: Method = kind(**{**{name: value for name, value in given.items() if name in known}, **own})
        return made

    def channel(self) -> Channel:
        """Return how messages travel."""
        wire = Wire(self.wire_down, self.wire_up, self.wire_feedback)
        privacy = Privacy(self.privacy, self.privacy_clip, self.privacy_noise, self.privacy_delta)
        return Channel(wire, privacy, self.clip_updates)

    def sketch(self) -> dict[str, Any]:
        """Return the settings of the sketch, besides compression and key."""
        blocks = self.blocks if self.blocks == "auto" else _whole("blocks", self.blocks)
        names = ("mode", "rows", "hash", "scale", "policy", "spread")
        return {"blocks": blocks, **{name: getattr(self, name) for name in names}}

    def load(self, data_dir: str | None = None) -> tuple[Task, Callable[[], Any]]:
        """Load the task and bind the model's constructor to it."""
        task = load_task(self.task, data_dir, limit=self.limit, seed=self.seed)
        if self.validation is not None:
            task = task.held_out(self.validation, self.seed)
        model = self.model or task.model
        extras = {name: value for name in ("stem", "norm", "init") if (value := getattr(self, name)) is not None}
        return task, constructor(model, task.inputs, task.classes, **extras) if isinstance(model, str) else model

    def run(
        self, out: Path | None = None, *, data_dir: str | None = None, device: str = "cpu", resume: bool = False,
        on_start: Callable[[Federation, list[Record]], None] | None = None,
        on_round: Callable[[Record], None] | None = None, engine: Callable[[Federation], Engine] | None = None,
    ) -> History:  # fmt: skip
        """Run the experiment, with its records in `out`; `on_start` gets the federation and the rounds run before."""
        method = self.make_method()
        task, build = self.load(data_dir)

        def started(federation: Federation, server: Server, history: list[Record]) -> None:
            if out is not None:
                records.check_data(out, task.checksum)
                if server.round < self.rounds:
                    records.remove_final(out)
                records.write_json(out / records.FOOTPRINT, predicted_bytes(federation, server))
            if on_start is not None:
                on_start(federation, history)

        return simulate(
            method, task, model=build, clients=self.clients, rounds=self.rounds, fraction=self.fraction,
            partition=self.partition, alpha=self.alpha, unequal=self.unequal, seed=self.seed, device=device, out=out,
            resume=resume, options=self.options(), channel=self.channel(), evaluation=self.evaluation, engine=engine,
            on_start=started, on_round=on_round,
        )  # fmt: skip


OPTIONS = Experiment.__dataclass_fields__
"""Every option by its name, with its help, its group and its choices."""


def predicted_bytes(federation: Federation, server: Server) -> dict[str, Any]:
    """Predict the bytes of a client's training step, full and sketched; nothing if the model needs real values."""
    method, client = federation.method, federation.clients[0]
    model = method.client_model(federation.build, client, method.download(server, client))
    try:
        sides = {"full": meta_model(model, full=True), "sketched": meta_model(model)}
        return {side: dataclasses.asdict(federation.predict(twin)) for side, twin in sides.items()}
    except ModelError:
        return {}


def read_experiment(path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
    """Read an experiment from a TOML file; `changes` go before what it says."""
    try:
        return Experiment.of({**records.read_options(path), **(changes or {})})
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


def _check_type(name: str, value: Any, wanted: Any) -> None:
    kinds = typing.get_args(wanted) or (wanted,)
    accepted = tuple(kind for kind in (*kinds, *((int,) if float in kinds else ())))
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
        raise OptionError(f"{name}={value!r} is not of type {kinds[0].__name__}.")
    if isinstance(value, float) and not abs(value) < LARGEST:
        raise OptionError(f"{name}={value!r} is not a number below {LARGEST:g}.")
    if isinstance(value, int) and not abs(value) < 2 ** (64 if name == "key" else 63):
        raise OptionError(f"{name}={value!r} has more than 64 bits.")


def _check_heeded(method: str, given: Mapping[str, Any]) -> None:
    """Refuse options that a method would not heed; `given` are those in `HEEDED` that are chosen, not usual."""
    if lost := [name for name in given if not heeds(method, name)]:
        others = [other for other in METHODS if all(heeds(other, name) for name in lost)]
        raise OptionError(
            f"{', '.join(f'{name}={given[name]!r}' for name in lost)}: {method} would not heed this. Leave it out, or "
            f"choose a method that takes it: {', '.join(others)}."
        )


def _check_needs(experiment: Experiment, chosen: Mapping[str, Any]) -> None:
    """Refuse options that change nothing without another one; `chosen` are those that are not at their defaults."""
    problems = []
    for name in chosen.keys() & NEEDS.keys():
        other, values = NEEDS[name]
        found = getattr(experiment, other)
        if found not in values if values else not found:
            remedy = f"set {other}{' to ' if values else ''}{' or '.join(values)}"
            problems.append(
                f"{name}={chosen[name]!r} changes nothing with {other}={found!r}: {remedy}, or leave it out."
            )
    if problems:
        raise OptionError("\n".join(sorted(problems)))


def heeds(method: str, option: str) -> bool:
    """Tell whether a method heeds an option of `HEEDED`; all others are heeded by all methods."""
    if method not in METHODS or option not in HEEDED:
        return True
    return bool({f.name for f in dataclasses.fields(METHODS[method])}.intersection(HEEDED[option]))


def is_compressed(method: str) -> bool:
    """Tell whether a method heeds the option `compression`."""
    kind = METHODS.get(method)
    return kind is None or "compression" in {f.name for f in dataclasses.fields(kind)}


def read_method_options(text: str) -> dict[str, Any]:
    """Read the options of a method itself."""
    try:
        found: dict[str, Any] = tomllib.loads(f"options = {{ {text} }}")["options"]
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"method_options={text!r} is not like 'fraction = 0.01, changes = true'. {error}") from error
    return found


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"{name}={text!r} is neither 'auto' nor a whole number of at least 1.")
    return int(text)
