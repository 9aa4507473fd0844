"""Minimax polynomials (Remez) for the elementary functions of kernels/src/math.rs and of the CPU backend: minimax.py [NAME].

Prints the coefficients, rounded to f32, highest power first, as Horner's scheme takes them, with the greatest relative error of the
polynomial in f64 before and after rounding. Needs nothing but Python, whose f64 leaves enough digits for f32.
"""

import math
import struct
import sys

# erfc(z) = exp(-z²) t P(t) with t = 1 / (1 + A z), for z from 0 to where erfc underflows in f32.
A = 0.35
LAST_Z = 10.2


def scaled_erfc(z):
    """exp(z²) erfc(z): from erfc, and beyond 4 from the continued fraction (Laplace), where the product would lose digits."""
    if z < 4:
        return math.exp(z * z) * math.erfc(z)
    fraction = z
    for k in range(120, 0, -1):
        fraction = z + k / 2 / fraction
    return 1 / (fraction * math.sqrt(math.pi))


def tail(t):
    return scaled_erfc((1 / t - 1) / A) / t


def sine(s):
    """(sin x / x - 1) / s, by its series: differences would lose digits."""
    term, total = -1 / 6, 0.0
    for k in range(2, 14):
        total += term
        term *= -s / (2 * k * (2 * k + 1))
    return total


def cosine(s):
    """(cos x - 1 + s / 2) / s², likewise."""
    term, total = 1 / 24, 0.0
    for k in range(3, 15):
        total += term
        term *= -s / (2 * k * (2 * k - 1))
    return total


def centre(s):
    """(Φ(x) - 1/2) / x, by the series of erf."""
    term, total = 1 / math.sqrt(2 * math.pi), 0.0
    for k in range(1, 40):
        total += term / (2 * k - 1)
        term *= -s / (2 * k)
    return total


# The function, what its error is relative to, the interval, and the degree.
QUARTER = (math.pi / 4) ** 2
FITS = {
    "normal_cdf, P(t) of the tail": (tail, tail, (1 / (1 + A * LAST_Z), 1.0), 9),
    "normal_cdf, around zero, in x²": (centre, centre, (0.0, 1.0), 5),
    # The sine is x + x s P(s) and the cosine 1 - s / 2 + s² P(s), with s = x²: so often an error of P counts.
    "sine, in x²": (sine, lambda s: (1 + s * sine(s)) / (s + 1e-3), (0.0, QUARTER), 3),
    "cosine, in x²": (cosine, lambda s: 1 / (s + 1e-3) ** 2, (0.0, QUARTER), 2),
}


def solve(rows):
    """Gauss with pivoting: the last column is the right-hand side."""
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i])]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - sum(rows[i][j] * x[j] for j in range(i + 1, n))) / rows[i][i]
    return x


def horner(coefficients, x):
    y = 0.0
    for c in coefficients:
        y = y * x + c
    return y


def remez(f, weight, interval, degree, rounds=40, samples=4000):
    """The polynomial, lowest power first, whose error relative to `weight` is the least; f is sampled once."""
    low, high = interval
    grid = [low + (high - low) * (1 - math.cos(math.pi * i / samples)) / 2 for i in range(samples + 1)]
    values, weights = [f(x) for x in grid], [abs(weight(x)) for x in grid]
    # In a variable from -1 to 1, in which powers are told apart best.
    scale = lambda x: (2 * x - low - high) / (high - low)
    at = [round(samples * i / (degree + 1)) for i in range(degree + 2)]
    for _ in range(rounds):
        rows = [[scale(grid[i]) ** k for k in range(degree + 1)] + [(-1) ** n * weights[i], values[i]] for n, i in enumerate(at)]
        found = solve(rows)[:-1]
        errors = [(horner(found[::-1], scale(x)) - y) / w for x, y, w in zip(grid, values, weights)]
        # The greatest error of each run of one sign.
        peaks, run = [], [0]
        for i in range(1, samples + 1):
            if errors[i] * errors[run[-1]] < 0:
                peaks.append(max(run, key=lambda j: abs(errors[j])))
                run = []
            run.append(i)
        peaks.append(max(run, key=lambda j: abs(errors[j])))
        while len(peaks) > degree + 2:
            peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
        if len(peaks) < degree + 2 or peaks == at:
            break
        at = peaks
    # Back to powers of x.
    a, b = 2 / (high - low), -(low + high) / (high - low)
    powers = [0.0] * (degree + 1)
    for k, c in enumerate(found):
        for j in range(k + 1):
            powers[j] += c * math.comb(k, j) * a**j * b ** (k - j)
    return powers, grid, values, weights


def main(only=""):
    to_f32 = lambda x: struct.unpack("f", struct.pack("f", x))[0]
    for name, (f, weight, interval, degree) in FITS.items():
        if only not in name:
            continue
        powers, grid, values, weights = remez(f, weight, interval, degree)
        rounded = [to_f32(c) for c in powers]
        worst = lambda cs: max(abs(horner(cs[::-1], x) - y) / w for x, y, w in zip(grid, values, weights))
        print(f"{name}: error {worst(powers):.2e}, rounded {worst(rounded):.2e}")
        for c in rounded[::-1]:
            print(f"    {c:.9g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
