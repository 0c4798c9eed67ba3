"""Write the report as one HTML page that needs nothing else: no network, no script, figures inside."""

import json
from collections.abc import Sequence
from html import escape

from comfetch import __version__
from comfetch.pareto import FRONT, by_task, points, verdicts
from comfetch.plots import accuracy_curves, colour, footprint_bars, pareto_picture, partition_picture, to_svg
from comfetch.report import NOTE, Group, Run, table

MOST_PARTITIONS = 4
"""Runs of many seeds have many partitions, which look alike: the first ones are drawn."""
CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #22262c; --soft: #5d6570; --line: #dfe3e8; --panel: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e4e7eb; --soft: #9aa3ae; --line: #2d333b; --panel: #1b1f25 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.2rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem }
.fronts li { margin: .4rem 0; max-width: 60rem }
p { color: var(--soft); margin: .4rem 0; max-width: 60rem }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--soft); background: var(--panel) }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper);
  white-space: normal; min-width: 8.5rem }
th:first-child { background: var(--panel) } tr:last-child td { border-bottom: 0 }
i.dot { display: inline-block; width: .75em; height: .75em; border-radius: 50%; margin-right: .5em }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1rem }
.large { grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)) }
figure { margin: 0; padding: .8rem; border: 1px solid var(--line); border-radius: 8px; background: var(--panel) }
figcaption { color: var(--soft); font-size: .9rem; margin-bottom: .4rem }
figure svg { display: block; width: 100%; max-width: 36rem; height: auto; margin: 0 auto }
svg text { font-family: system-ui, sans-serif !important }
ul.key { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .4rem 0 .8rem }
details { margin: .5rem 0 } summary { cursor: pointer } pre { overflow-x: auto; font-size: .85rem; color: var(--soft) }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem }
"""


def to_html(groups: Sequence[Group], missed: Sequence[str] = ()) -> str:
    """Write the page: table, fronts, curves, partitions, footprints, options.

    Args:
        missed: sentences about what was not run, since it could not meet a budget.
    """
    tasks = ", ".join(dict.fromkeys(str(run.options.get("task", "?")) for group in groups for run in group.runs))
    count = sum(len(group.runs) for group in groups)
    body = [
        f"<h1>Federated runs on {escape(tasks)}</h1>",
        f"<p>{count} run{'s' if count > 1 else ''} of comfetch {__version__}.</p>",
        _table(groups),
        f"<p>{escape(NOTE)}</p>",
        _fronts(groups, missed),
        _curves(groups),
        _clients(groups),
        _options(groups),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>comfetch: {escape(tasks)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _dot(number: int) -> str:
    return f'<i class="dot" style="background:{colour(number)}"></i>'


def _table(groups: Sequence[Group]) -> str:
    header, *rows = table(groups)
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for number, (first, *rest) in enumerate(rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f"<tr><td>{_dot(number)}{escape(first)}</td>{cells}</tr>")
    return '<h2>Results</h2>\n<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _fronts(groups: Sequence[Group], missed: Sequence[str]) -> str:
    """Say and draw which run wins where, for each task of its own."""
    parts = []
    for number, (task, members) in enumerate(by_task(groups).items()):
        found = verdicts(members)
        told = "".join(
            f"<li>{escape(axis.title.capitalize())}. {escape(' '.join(words))}</li>" for axis, words in found
        )
        figures = "".join(
            _figure(
                to_svg(pareto_picture(points(members, axis), axis), f"front{number}{axis.name}"),
                f"Accuracy against {axis.title}" + (f", {task}" if number else ""),
            )
            for axis, _ in found
        )
        parts.append(f'<ul class="fronts">{told}</ul>\n<div class="figures large">{figures}</div>')
    told = "".join(f"<p>{escape(sentence)}</p>" for sentence in missed)
    about = f"<p>{escape(FRONT)}</p>" if parts else ""
    return f"<h2>Which wins where</h2>\n{told}{about}{''.join(parts)}" if parts or told else ""


def _curves(groups: Sequence[Group]) -> str:
    key = "".join(f"<li>{_dot(number)}{escape(group.label)}</li>" for number, group in enumerate(groups))
    figures = "".join(
        _figure(to_svg(accuracy_curves(groups, against), against), f"Accuracy against {against}")
        for against in ("rounds", "bytes", "seconds")
    )
    return f'<h2>Curves</h2>\n<ul class="key">{key}</ul>\n<div class="figures">{figures}</div>'


def _clients(groups: Sequence[Group]) -> str:
    """Draw what clients have: examples and memory."""
    figures = _partitions(groups) + _footprints(groups)
    return f'<h2>Clients</h2>\n<div class="figures">{figures}</div>' if figures else ""


def _partitions(groups: Sequence[Group]) -> str:
    """Draw each different partition once."""
    different: dict[str, Run] = {}
    for group in groups:
        for run in group.runs:
            if run.partition:
                different.setdefault(json.dumps(run.partition), run)
    return "".join(
        _figure(to_svg(partition_picture(**run.partition), f"partition{number}"), _describe_partition(run))
        for number, run in enumerate([*different.values()][:MOST_PARTITIONS])
    )


def _describe_partition(run: Run) -> str:
    kind = run.options.get("partition", "?")
    alpha = f", alpha {run.options.get('alpha')}" if kind.startswith("dirichlet") else ""
    return f"Examples of each label at each client: {kind}{alpha}, seed {run.options.get('seed', '?')}"


def _footprints(groups: Sequence[Group]) -> str:
    found = {group.label: group.runs[0].footprint for group in groups if group.runs[0].footprint}
    if not found:
        return ""
    bars: dict[str, dict[str, int]] = {}
    twins = {json.dumps(sizes["full"]): sizes["full"] for sizes in found.values() if sizes["full"] != sizes["sketched"]}
    for number, sizes in enumerate(twins.values(), 1):
        bars["full model" if len(twins) == 1 else f"full model {number}"] = sizes
    alike: dict[str, list[str]] = {}
    for label, sizes in found.items():
        if sizes["sketched"] not in twins.values():
            alike.setdefault(json.dumps(sizes["sketched"]), []).append(label)
    for text, (first, *others) in alike.items():
        bars[f"{first} and {len(others)} more" if others else first] = json.loads(text)
    svg = to_svg(footprint_bars(bars), "footprint")
    return _figure(svg, "Predicted peak of one training step on a client, by kind")


def _options(groups: Sequence[Group]) -> str:
    parts = ["<h2>Options</h2>"]
    for number, group in enumerate(groups):
        folders = "\n".join(str(run.folder) for run in group.runs)
        text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in group.runs[0].options.items())
        summary = f"<summary>{_dot(number)}{escape(group.label)}</summary>"
        parts.append(f"<details>{summary}<pre>{escape(folders)}\n\n{escape(text)}</pre></details>")
    return "\n".join(parts)


def _figure(svg: str, caption: str) -> str:
    titled = svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f"<figure><figcaption>{escape(caption)}</figcaption>\n{titled}</figure>\n"
