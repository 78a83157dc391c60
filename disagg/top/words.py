"""Formats numbers and names for display."""

from __future__ import annotations


def rate_words(bytes_per_s: float) -> str:
    """Formats a rate as '1.25 GB/s': decimal units, three digits; '-' for 0."""
    return "-" if bytes_per_s <= 0 else f"{_scaled(bytes_per_s, ('', 'k', 'M', 'G', 'T'))}B/s"


def count_words(count: float) -> str:
    """Formats a count as '1.25 k': decimal, three digits."""
    return _scaled(count, ("", "k", "M", "G")).strip()


def time_words(seconds: float) -> str:
    """Formats a duration as '12.5 ms', '1.25 s' or '2 h 05 min'; '-' for 0."""
    if seconds <= 0:
        return "-"
    if seconds < 0.9995:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three(seconds)} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def part_words(part: float, whole: float) -> str:
    """Formats a share as '45%'; '-' for a whole of 0."""
    return f"{part / whole:.0%}" if whole > 0 else "-"


def plain(name: str) -> str:
    """Returns `name` without control characters, which a terminal would execute; they are replaced."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in name)


def _scaled(value: float, prefixes: tuple[str, ...]) -> str:
    *small, largest = prefixes
    for prefix in small:
        if value < 999.5:
            return f"{_three(value)} {prefix}"
        value /= 1000
    return f"{_three(value)} {largest}"


def _three(value: float) -> str:
    """Formats three digits without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else "0" if value < 0.001 else f"{value:.3g}"
