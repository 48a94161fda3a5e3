# SPDX-License-Identifier: Apache-2.0
"""A plan in a notebook: tables, the step as an SVG picture, and a figure of matplotlib."""
from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import DynmoError

if TYPE_CHECKING:
    from ._plan import Plan

Slice = tuple[int, str, int, int, int, int]
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MAX_SHAPES = 20000  # a notebook with more is slow to open


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns an HTML table."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def compute(slices: Iterable[Slice]) -> list[Slice]:
    """Returns the actions of a picture: those that compute."""
    return [one for one in slices if one[1] in COLOURS]


def svg(slices: Sequence[Slice], ranks: int, step_s: float) -> str:
    """Returns the step as a picture, or "" if it is too large. A rank is a row, and time runs from left to right."""
    shown = compute(slices)
    if not shown or len(shown) > MAX_SHAPES:
        return ""
    width, row, left = 900, 22, 60
    scale = (width - left) / (step_s * 1e9)
    height = ranks * row + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for rank in range(ranks):
        y = rank * row
        parts.append(f'<text x="0" y="{y + 15}" fill="currentColor">rank {rank}</text>')
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{width - left}" height="{row - 4}" fill="#8882"/>')
    for rank, kind, stage, micro_batch, start, end in shown:
        x, length = left + start * scale, (end - start) * scale
        parts.append(
            f'<rect x="{x:.2f}" y="{rank * row + 2}" width="{length:.2f}" height="{row - 4}" fill="{COLOURS[kind]}" '
            f'stroke="#fff" stroke-width="0.3"><title>{stage}{kind}{micro_batch}, {(end - start) / 1e6:.3f} ms</title></rect>'
        )
    parts.append(f'<text x="{left}" y="{height - 6}" fill="currentColor">0</text>')
    parts.append(f'<text x="{width}" y="{height - 6}" text-anchor="end" fill="currentColor">{step_s * 1e3:.3f} ms</text></svg>')
    return "".join(parts)


def figure(plan: Plan, ax: Any = None) -> Any:
    """Draws the step on axes of matplotlib, and returns them."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise DynmoError("plot() needs matplotlib, which is not installed: pip install matplotlib") from error
        _, ax = pyplot.subplots(figsize=(10, 1 + 0.4 * plan.ranks))
    shown = compute(plan.slices)
    for kind in dict.fromkeys(one[1] for one in shown):
        of_kind = [one for one in shown if one[1] == kind]
        ax.barh(
            [one[0] for one in of_kind],
            [(one[5] - one[4]) / 1e6 for one in of_kind],
            left=[one[4] / 1e6 for one in of_kind],
            color=COLOURS[kind],
            label=NAMES[kind],
            edgecolor="white",
            linewidth=0.3,
        )
    ax.set_yticks(range(plan.ranks), [f"rank {rank}" for rank in range(plan.ranks)])
    ax.invert_yaxis()
    ax.set_xlabel("ms")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False)
    return ax
