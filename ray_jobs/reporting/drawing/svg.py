"""Inline SVG: elements, scales, axes and marks in the page's colours.

In: numbers and names, which are escaped. Out: `Markup`, the same for the same input. A mark's title is shown on hover
and read by screen readers. The page's style sheet defines the classes; `s1` to `s6` set the colour of a series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH = 400  # of a figure in its own units, which are pixels on a wide screen
LEFT, RIGHT = 46.0, 390.0  # where the plotted area begins and ends
COLOURS = 6
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "m-3.5-3.5h7v7h-7z",
    "m0-5l5 5l-5 5l-5-5z",
    "m0-5l4.8 8.5h-9.6z",
    "m0 5l4.8-8.5h-9.6z",
    "m-4-4l8 8m0-8l-8 8",
    "m-5 0h10m-5-5v10",
)


def element(name: str, *children: str, title: str = "", **attributes: str | float) -> Markup:
    """Return an element. An underscore in an attribute's name stands for a hyphen; one at the end is dropped.

    Args:
        title: what the element shows; it becomes an image of its own for screen readers.
    """
    if title:
        attributes["role"] = "img"
        children = (Markup("<title>{}</title>").format(title), *children)
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _text(value)) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, Markup("").join(map(escape, children)))  # noqa: S704 (a name of ours)


def _text(value: str | float) -> str:
    """Return a value of an attribute, numbers with at most two decimals."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


class Scale(NamedTuple):
    """A map from values to positions, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value."""
        low, high, value = map(math.log, (self.low, self.high, value)) if self.is_log else (*self[:2], value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def spread(values: Sequence[float], start: float, end: float, is_log: bool = False, pad: float = 0.06) -> Scale:
    """Return a scale that holds all values, with a margin of `pad` of the range at both ends."""
    low, high = min(values), max(values)
    if is_log:
        margin = (high / low) ** pad if high > low else 2.0
        return Scale(low / margin, high * margin, start, end, is_log=True)
    margin = pad * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - margin, high + margin, start, end)


def fractions(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale that holds all values, which are fractions, and does not go below 0 or above 1."""
    scale = spread(values, start, end)
    return scale._replace(low=max(0.0, scale.low), high=min(1.0, scale.high))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return about `most` round values from low to high."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, factors: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Return the powers of ten times these factors from low to high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [value for value in values if low <= value <= high]


def percents(scale: Scale, most: int = 5) -> dict[float, str]:
    """Return the ticks of a scale of fractions, with their labels."""
    return {tick: f"{100 * tick:g}%" for tick in ticks(scale.low, scale.high, most)}


def numbers(values: Sequence[float]) -> dict[float, str]:
    """Return ticks with their labels."""
    return {value: f"{value:,.10g}" for value in values}


@dataclass(frozen=True)
class Panel:
    """A rectangle of a figure with a scale for each direction; y grows upward."""

    x: Scale
    y: Scale

    def axes(self, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str], x: str, y: str) -> Markup:
        """Draw both axes with their names; a tick's label may have several lines, and an empty name is left out."""
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        parts = [text(left, bottom + 32, x, anchor="start")] if x and right - left < WIDTH / 2 else []
        parts += [text(right, bottom + 32, x, anchor="end")] if x and not parts else []
        parts += [text(max(0, left - LEFT), top - 8, y, anchor="start")] if y else []
        for value, label in y_ticks.items():
            at = self.y.at(value)
            parts.append(element("path", d=f"M{left:g} {at:.1f}H{right:g}", class_="grid"))
            parts += [text(left - 6, at + 4, label, anchor="end")] if label else []
        parts.append(element("path", d=f"M{left:g} {bottom:g}H{right:g}", class_="axis"))
        for value, label in x_ticks.items():
            for line, words in enumerate(label.split("\n")):
                parts.append(text(self.x.at(value), bottom + 16 + 12 * line, words))
        return element("g", *parts, aria_hidden="true")

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: int, title: str, style: str = "") -> Markup:
        """Draw a line through points, as one mark; `style` is a class of its own."""
        points = "L".join(f"{self.x.at(x):.1f} {self.y.at(y):.1f}" for x, y in zip(xs, ys, strict=True))
        points += "h0" * (len(xs) == 1)  # a line of one point is a dot, because its ends are round
        return element("path", d=f"M{points}", class_=f"line {series(colour)} {style}".rstrip(), title=title)

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], colour: int) -> Markup:
        """Fill the space between two lines."""
        upper = [f"{self.x.at(x):.1f} {self.y.at(y):.1f}" for x, y in zip(xs, highs, strict=True)]
        lower = [f"{self.x.at(x):.1f} {self.y.at(y):.1f}" for x, y in zip(xs, lows, strict=True)]
        outline = "L".join([*upper, *lower[::-1]])
        return element("path", d=f"M{outline}Z", class_=f"band {series(colour)}", aria_hidden="true")

    def mark(self, x: float, y: float, colour: int, title: str, shape: int = 0, style: str = "") -> Markup:
        """Draw a point; `style` may be 'hollow' or 'ring'."""
        return _mark(self.x.at(x), self.y.at(y), colour, shape, title, style)


def _mark(x: float, y: float, colour: int, shape: int, title: str = "", style: str = "") -> Markup:
    path = f"M{x:.1f} {y:.1f}{SHAPES[shape % len(SHAPES)]}"
    return element("path", d=path, class_=f"mark {series(colour)} {style}".rstrip(), title=title)


def series(number: int) -> str:
    """Return the class of a series' colour; series 0 has the first colour, -1 that of text."""
    return "ink" if number < 0 else f"s{number % COLOURS + 1}"


def text(x: float, y: float, words: str, anchor: str = "middle", **attributes: str) -> Markup:
    """Return a text at its baseline."""
    return element("text", words, x=round(x, 1), y=round(y, 1), text_anchor=anchor, **attributes)


def figure(
    label: str, height: float, *parts: str, legend: Sequence[tuple[str, int, int]] = (), width: float = WIDTH
) -> Markup:
    """Return the SVG of a figure, followed by its legend: (name, colour, shape) of each series."""
    box = f"0 0 {width:g} {height:g}"
    drawing = element("svg", *parts, viewBox=box, width=width, role="group", aria_label=label, class_="plot")
    keys = [
        element(
            "li",
            element("svg", _mark(7, 7, colour, shape), viewBox="0 0 14 14", class_="key", aria_hidden="true"),
            name,
        )
        for name, colour, shape in legend
    ]
    return drawing + (element("ul", *keys, class_="legend") if keys else Markup(""))
