"""Numbers and names as a person reads them."""

from __future__ import annotations


def rate_words(bytes_per_s: float) -> str:
    """'1.25 GB/s': decimal units, three digits; '-' for nothing."""
    return "-" if bytes_per_s <= 0 else f"{_scaled(bytes_per_s, ('', 'k', 'M', 'G', 'T'))}B/s"


def count_words(count: float) -> str:
    """'1.25 k': decimal, three digits."""
    return _scaled(count, ("", "k", "M", "G")).strip()


def time_words(seconds: float) -> str:
    """'12.5 ms', '1.25 s', '2 h 05 min'; '-' for nothing."""
    if seconds <= 0:
        return "-"
    if seconds < 0.9995:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three(seconds)} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def part_words(part: float, whole: float) -> str:
    """'45%'; '-' of nothing."""
    return f"{part / whole:.0%}" if whole > 0 else "-"


def plain(name: str) -> str:
    """`name` without characters that would command a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in name)


def _scaled(value: float, prefixes: tuple[str, ...]) -> str:
    *small, largest = prefixes
    for prefix in small:
        if value < 999.5:
            return f"{_three(value)} {prefix}"
        value /= 1000
    return f"{_three(value)} {largest}"


def _three(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.0f}" if value >= 99.95 else "0" if value < 0.001 else f"{value:.3g}"
