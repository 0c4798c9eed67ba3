"""Compare sketched layers with their full twins: time of forward and backward, and peak bytes.

    python -m benchmarks.layers            # run, print, and write benchmarks/results/layers.json
    python -m benchmarks.layers --table    # print the Markdown tables of the committed results

Every time is a *ratio* to the full layer: runs are interleaved in one process, and the median of the ratios is
reported, so that other load on the machine hits both. Beside it stands the limit: the ratio of the small product
alone, without the sums of signs around it. Exit code 1 means that a threshold was missed.
"""

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comfetch
from comfetch.footprint import track
from comfetch.layers.base import Product
from comfetch.models import resnet18

RESULTS = Path(__file__).parent / "results" / "layers.json"
COMPRESSIONS = (4, 10)
STEP_LIMITS = {("output", 4): 0.40, ("output", 10): 0.33, ("input", 4): 0.38, ("input", 10): 0.22}
Call = Callable[[], object]

CONVOLUTIONS = [  # the paper's ResNet-18 on 32x32 images, batch 128: channels, outputs, map, stride
    (64, 64, 8, 1), (64, 128, 8, 2), (128, 128, 4, 1), (128, 256, 4, 2), (256, 256, 2, 1), (256, 512, 2, 2),
    (512, 512, 1, 1),
]  # fmt: skip
WIDTH, TOKENS, SEQUENCES = 768, 128, 8


def layers() -> list[tuple[str, Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], bool]]:
    """List name, constructor, inputs and whether the layer must not be slower than its twin."""
    cases: list[tuple[str, Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], bool]] = []
    for before, after, size, stride in CONVOLUTIONS:
        cases.append(
            (
                f"Conv2d {before}->{after} 3x3/{stride} on {size}x{size}",
                lambda b=before, a=after, s=stride: nn.Conv2d(b, a, 3, stride=s, padding=1, bias=False),
                lambda b=before, n=size: (torch.randn(128, b, n, n),),
                True,
            )
        )
    for before, after in ((WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)):
        cases.append(
            (
                f"Linear {before}->{after}",
                lambda b=before, a=after: nn.Linear(b, a),
                lambda b=before: (torch.randn(SEQUENCES, TOKENS, b),),
                True,
            )
        )
    x = torch.randn(SEQUENCES, TOKENS, WIDTH)
    attention = lambda: nn.MultiheadAttention(WIDTH, 12, batch_first=True)  # noqa: E731
    cases.append((f"MultiheadAttention {WIDTH}", attention, lambda: (x, x, x), True))
    ids = torch.randint(0, 30522, (SEQUENCES, TOKENS))
    cases.append((f"Embedding 30522x{WIDTH}", lambda: nn.Embedding(30522, WIDTH), lambda: (ids,), True))
    steps = torch.randn(32, 64, 256)
    cases.append(("LSTM 256->256, 64 steps", lambda: nn.LSTM(256, 256, batch_first=True), lambda: (steps,), False))
    cases.append(("GRU 256->256, 64 steps", lambda: nn.GRU(256, 256, batch_first=True), lambda: (steps,), False))
    return cases


def run_layer(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Make a call of forward and backward, with gradients of inputs and weights."""
    leaves = {id(t): t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs}
    arguments = [leaves[id(t)] for t in inputs]
    wanted = [t for t in leaves.values() if t.requires_grad] + [p for p in layer.parameters() if p.requires_grad]
    options = {"need_weights": False} if len(inputs) == 3 else {}

    def call() -> object:
        out = layer(*arguments, **options)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, wanted, torch.ones_like(out))

    return call


class ProductAlone(nn.Module):
    """The small product of a convolution or linear layer without any sum of signs; outputs are cut or filled up."""

    def __init__(self, sketched: nn.Module) -> None:
        super().__init__()
        self.full = (sketched.full,)  # in a tuple, so that it is no submodule
        product: Product = sketched.products["weight"]
        self.parts, self.plan = product.parts, product.plan
        self.kernel = nn.Parameter(product.weight(sketched.weight.detach()).contiguous().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the small product."""
        (full,) = self.full
        inputs = self.parts * self.kernel.shape[2]
        outputs = self.plan.geometry.outputs * self.plan.geometry.groups
        if isinstance(full, nn.Linear):
            x = fit(x.reshape(-1, x.shape[-1]), 1, inputs)
            z = torch.bmm(x.view(len(x), self.parts, -1).transpose(0, 1), self.kernel[..., 0].transpose(1, 2))
            return fit(z.transpose(0, 1).reshape(len(x), -1), 1, outputs)
        kernel = self.kernel.flatten(0, 1).unflatten(2, full.kernel_size)
        z = F.conv2d(fit(x, 1, inputs), kernel, None, full.stride, full.padding, full.dilation, self.parts)
        return fit(z, 1, outputs)


class Nothing(nn.Module):
    """A convolution that costs nothing: it passes its inputs on, every stride-th of them, as so many outputs."""

    def __init__(self, sketched: nn.Module) -> None:
        super().__init__()
        self.stride, self.outputs = sketched.full.stride, sketched.full.out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Pass inputs on."""
        return fit(x[:, :, :: self.stride[0], :: self.stride[1]], 1, self.outputs)


def fit(x: Tensor, dim: int, size: int) -> Tensor:
    """Cut or repeat a dimension to a size."""
    if x.shape[dim] >= size:
        return x.narrow(dim, 0, size)
    return torch.cat([x] * (-(-size // x.shape[dim])), dim).narrow(dim, 0, size)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as it was seen to do in runs on CIFAR-10.

    It returns memory above a limit to the system, and sets that limit by the largest block freed so far, of those up to
    32 MB. Without this, a tenth of a sketched step is the system's work on pages that go and come back.
    """
    torch.zeros(31 * 2**20, dtype=torch.uint8)


def race(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Return the median ratio of each call's time to that of `full`, from interleaved runs; `full` itself in ms."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    full = times["full"][2:]
    ratios = {n: statistics.median(a / b for a, b in zip(t[2:], full, strict=True)) for n, t in times.items()}
    return {**ratios, "full": statistics.median(full) * 1e3}


def peak(call: Call, held: nn.Module) -> int:
    """Return the peak of live bytes of one call, the layer's own tensors included."""
    with track([*held.parameters(), *held.buffers()]) as live:
        call()
    return live.peak


def measure_layers(repeats: int, threads: int) -> list[dict[str, object]]:
    """Measure every layer at every compression."""
    torch.set_num_threads(threads)
    rows: list[dict[str, object]] = []
    for name, build, inputs, bound in layers():
        for mode in ("output", "input"):
            for compression in COMPRESSIONS:
                full, data = build(), inputs()
                sketched = comfetch.sketch(build, compression=compression, mode=mode, policy="all")
                calls = {"full": run_layer(full, data), "sketched": run_layer(sketched, data)}
                if isinstance(full, nn.Conv2d | nn.Linear):
                    calls["limit"] = run_layer(ProductAlone(sketched), data)
                result = race(calls, repeats)
                rows.append(
                    {
                        "layer": f"{name}, {threads} thread{'s' * (threads > 1)}", "mode": mode,
                        "compression": compression, "full_ms": result["full"],
                        "ratio": result["sketched"], "limit": result.get("limit"), "bound": 1.0 if bound else None,
                        "full_bytes": peak(calls["full"], full), "bytes": peak(calls["sketched"], sketched),
                    }
                )  # fmt: skip
                print(format_row(rows[-1]), flush=True)
    return rows


def step(model: nn.Module) -> Call:
    """Make a whole training step with Adam on a batch of 128 images of 32x32."""
    optimiser = torch.optim.Adam(model.parameters())
    x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))

    def call() -> None:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()

    return call


def replaced(model: nn.Module, instead: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Copy a sketched model with something else instead of each sketched layer."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for child, module in list(parent.named_children()):
            if isinstance(module, comfetch.layers.SketchedLayer):
                setattr(parent, child, instead(module))
    return twin


def measure_steps(repeats: int, threads: int) -> list[dict[str, object]]:
    """Measure a whole step of the paper's ResNet-18 with the defaults."""
    torch.set_num_threads(threads)
    models = {"full": resnet18()}
    for mode, compression in STEP_LIMITS:
        models[f"{mode} {compression}"] = comfetch.sketch(resnet18, compression=compression, mode=mode)
        models[f"{mode} {compression} limit"] = replaced(models[f"{mode} {compression}"], ProductAlone)
    models["floor"] = replaced(models["output 10"], Nothing)
    result = race({name: step(model) for name, model in models.items()}, repeats)
    told = f"{threads} thread{'s' * (threads > 1)}"
    floor = {"layer": f"ResNet-18 step without its sketched layers, {told}", "mode": "", "compression": ""}
    rows: list[dict[str, object]] = [
        {**floor, "full_ms": result["full"], "ratio": result["floor"], "limit": None, "bound": None}
    ]
    print(format_row(rows[0]), flush=True)
    for (mode, compression), bound in STEP_LIMITS.items():
        name = f"{mode} {compression}"
        rows.append(
            {
                "layer": f"ResNet-18 step, {told}", "mode": mode, "compression": compression,
                "full_ms": result["full"], "ratio": result[name],
                "limit": result[f"{name} limit"], "bound": bound,
            }
        )  # fmt: skip
        print(format_row(rows[-1]), flush=True)
    return rows


def format_row(row: dict[str, object]) -> str:
    """Write one result for people."""
    limit = "-" if row["limit"] is None else f"{row['limit']:.2f}"
    missed = " MISSED" if is_missed(row) else ""
    bytes_ = f", bytes {row['bytes'] / row['full_bytes']:.2f}" if "bytes" in row else ""
    return (
        f"{row['layer']}, {row['mode']}, compression {row['compression']}: {row['ratio']:.2f} of "
        f"{row['full_ms']:.1f} ms (limit {limit}{bytes_}){missed}"
    )


def is_missed(row: dict[str, object]) -> bool:
    """Tell whether a result is above its bound."""
    return row["bound"] is not None and row["ratio"] > row["bound"]


def table(rows: list[dict[str, object]]) -> str:
    """Write results as Markdown."""
    lines = ["| layer | mode | compression | time | limit | bound | peak bytes |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        bound = "" if row["bound"] is None else f"{row['bound']:.2f}"
        size = f"{row['bytes'] / row['full_bytes']:.2f}" if "bytes" in row else ""
        cells = [row["layer"], row["mode"], row["compression"], f"{row['ratio']:.2f}", limit, bound, size]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark, or print the table of the committed results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the committed results as Markdown")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved runs of each layer")
    parser.add_argument("--steps-only", action="store_true", help="measure the whole step only, and write nothing")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(RESULTS.read_text())["rows"]))
        return 0
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    keep_freed_memory()
    rows = measure_steps(options.repeats, 1) + measure_steps(options.repeats, 2)
    if not options.steps_only:
        rows += measure_layers(options.repeats, 1) + measure_layers(options.repeats, 2)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        results = {"torch": torch.__version__, "repeats": options.repeats, "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    missed = [row for row in rows if is_missed(row)]
    print(f"{len(missed)} of {len(rows)} results miss their bound.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
