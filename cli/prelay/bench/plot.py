"""Line charts as SVG, side by side, with nothing but text and lines in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _HEAD, _FOOT = 420, 300, 64, 26
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 74
_COLOURS = ("#1f6fb2", "#d9822b", "#3d8f5f", "#b0413e", "#7a5ba6", "#666666")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-size:15px;font-weight:600}.h{font-weight:600}"
    ".n{font-size:11px;fill:#555}.g{stroke:#ddd}.a{stroke:#888}polyline{fill:none;stroke-width:2}"
)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `series` are (name, points); y begins at 0. `even`: the x values stand at equal distances."""

    title: str
    x: str
    y: str
    series: Sequence[tuple[str, Points]]
    even: bool = False


def draw(title: str, note: str, panels: Sequence[Panel]) -> str:
    """The whole picture."""
    # About the width of a letter of each; no viewer measures text for us.
    width = max(_WIDTH * len(panels), round(32 + 8.6 * len(title)), round(32 + 6.2 * len(note)))
    height = _HEAD + _HEIGHT + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        _text(16, 26, title, "t"),
        _text(16, 46, note, "n"),
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * _WIDTH},{_HEAD})">{"".join(_chart(panel))}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _chart(panel: Panel) -> Iterator[str]:
    values = sorted({x for _, points in panel.series for x, _ in points})
    ticks = scale(max((y for _, points in panel.series for _, y in points), default=0.0))
    across = _Across(values, panel.even)
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def down(y: float) -> float:
        return bottom - (bottom - _TOP) * y / ticks[-1]

    yield _text(_LEFT, 18, panel.title, "h")
    for tick in ticks:
        kind = "a" if tick == 0 else "g"
        yield f'<line class="{kind}" x1="{_LEFT}" x2="{right}" y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        yield _text(_LEFT - 6, down(tick) + 4, f"{tick:g}", "n", "end")
    for value in across.ticks:
        yield _text(across(value), bottom + 16, f"{value:g}", "n", "middle")
    yield _text((_LEFT + right) / 2, bottom + 34, panel.x, "n", "middle")
    middle = (_TOP + bottom) / 2
    turned = f'transform="translate(14,{middle}) rotate(-90)"'
    yield f'<text class="n" text-anchor="middle" {turned}>{escape(panel.y)}</text>'
    at = float(_LEFT)
    for (name, points), colour in zip(panel.series, _COLOURS * (1 + len(panel.series) // 6), strict=False):
        line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
        yield f'<polyline points="{line}" stroke="{colour}"/>'
        if len(points) <= 24:
            yield from (f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>' for x, y in points)
        yield f'<rect x="{at:.0f}" y="{_HEIGHT - 24}" width="14" height="3" fill="{colour}"/>'
        yield _text(at + 18, _HEIGHT - 18, name, "n")
        at += 34 + 6.4 * len(name)


class _Across:
    """x values to places: at equal distances, or in proportion (ticks are then round numbers)."""

    def __init__(self, values: Sequence[float], even: bool) -> None:
        self._places = {value: index for index, value in enumerate(values)} if even else None
        self.ticks = list(values) if even else scale(max(values, default=0.0))
        self._last = max(1, len(values) - 1) if even else self.ticks[-1]

    def __call__(self, value: float) -> float:
        place = self._places[value] if self._places is not None else value
        margin = 14 if self._places is not None else 0
        return _LEFT + margin + (_WIDTH - _RIGHT - _LEFT - 2 * margin) * place / self._last


def scale(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`, four to eight of them."""
    if not highest > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(power * part for part in (0.2, 0.25, 0.5, 1, 2) if highest / (power * part) <= 6)
    return [round(step * n, 10) for n in range(math.ceil(highest / step - 1e-9) + 1)]


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
