"""Formats numbers and names for display."""

from __future__ import annotations


def rate_words(bytes_per_s: float) -> str:
    """Formats a rate like '1.25 GB/s', with decimal units and three digits; '-' for 0."""
    return "-" if bytes_per_s <= 0 else f"{_scaled(bytes_per_s, ('', 'k', 'M', 'G', 'T'))}B/s"


def count_words(count: float) -> str:
    """Formats a count like '1.25 k', with decimal prefixes and three digits."""
    return _scaled(count, ("", "k", "M", "G")).strip()


def time_words(seconds: float) -> str:
    """Formats a duration like '12.5 ms', '1.25 s' or '2 h 05 min'; '-' for 0."""
    if seconds <= 0:
        return "-"
    if seconds < 0.9995:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three(seconds)} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def part_words(part: float, whole: float) -> str:
    """Formats `part / whole` like '45%'; '-' if `whole` is 0."""
    return f"{part / whole:.0%}" if whole > 0 else "-"


def plain(name: str) -> str:
    """Returns `name` with its control characters replaced, because a terminal would execute them."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in name)


def _scaled(value: float, prefixes: tuple[str, ...]) -> str:
    *small, largest = prefixes
    for prefix in small:
        if value < 999.5:
            return f"{_three(value)} {prefix}"
        value /= 1000
    return f"{_three(value)} {largest}"


def _three(value: float) -> str:
    """Formats a number below 1000 with three significant digits and without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else "0" if value < 0.001 else f"{value:.3g}"
