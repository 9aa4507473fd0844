#!/usr/bin/env python3
"""Draws the losses of a trainer's log as SVG. Standard library only.

    python3 plot_loss.py log.jsonl loss.svg
"""

import json
import math
import pathlib
import sys

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 44
SMOOTHING = 0.8  # of the line: the share that a step's loss keeps of the ones before


def read(path):
    """Step and loss; of a step that was run again, what came last."""
    losses = {}
    for line in path.read_text().splitlines():
        report = json.loads(line)
        if report["loss"] is not None:
            losses[report["step"]] = report["loss"]
    return sorted(losses.items())


def smooth(points):
    value, weight, line = 0.0, 0.0, []
    for step, loss in points:
        value = SMOOTHING * value + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        line.append((step, value / weight))
    return line


def ticks(low, high):
    """About five round numbers from `low` to `high`."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    size = min((unit * factor for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first = math.ceil(low / size - 1e-9)
    return [round(i * size, 10) for i in range(first, math.floor(high / size + 1e-9) + 1)]


def draw(points):
    last = max(points[-1][0], 2)
    high = max(loss for _, loss in points)
    x = lambda step: LEFT + (step - 1) / (last - 1) * (WIDTH - LEFT - RIGHT)
    y = lambda loss: HEIGHT - BOTTOM - loss / high * (HEIGHT - TOP - BOTTOM)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Loss of each step, and its moving mean</text>',
    ]
    for loss in ticks(0, high):
        out.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')
    for step in ticks(1, last):
        if step == int(step):
            place = f'x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}"'
            out.append(f'<text {place} text-anchor="middle">{step:g}</text>')
    place = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}"'
    out.append(f'<text {place} text-anchor="middle">step</text>')
    for step, loss in points:
        out.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="2.5" fill="#9bc"/>')
    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in smooth(points))
    out.append(f'<polyline points="{line}" fill="none" stroke="#146" stroke-width="2"/>')
    return "\n".join([*out, "</svg>", ""])


def main():
    log, output = map(pathlib.Path, sys.argv[1:])
    points = read(log)
    if not points:
        sys.exit(f"{log}: there are no losses")
    output.write_text(draw(points))


if __name__ == "__main__":
    main()
