"""The sections `metrics` and `log`."""

from __future__ import annotations

from typing import Literal

from disagg.core.config.section import Section

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["plain", "json"]


class MetricsConfig(Section, frozen=True):
    """Settings of the metrics of ranks, groups and routers."""

    interval_s: float = 1.0
    """Interval of reports from ranks to leaders and from leaders to routers; 0: no reports, so `/metrics` lacks the
    groups."""
    otlp_endpoint: str | None = None
    """URL of a collector (OTLP over HTTP), such as http://localhost:4318. `serve` sends it a trace span per
    request."""
    profile_folder: str | None = None
    """Folder on the host of each rank for traces of `disagg profile`: an absolute path, or one that begins with ~/.
    None: ranks refuse to record. With a folder, every holder of an API key may record."""

    def __post_init__(self) -> None:
        # A shorter interval would load ranks and leaders with reports.
        self._needs(
            self.interval_s == 0 or 0.01 <= self.interval_s <= 3600, "interval_s", "0, or from 0.01 to 3600"
        )
        http = self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://"))
        self._needs(http, "otlp_endpoint", "a URL that begins with http:// or https://")
        absolute = self.profile_folder is None or self.profile_folder.startswith(("/", "~/"))
        self._needs(absolute, "profile_folder", "an absolute path, or one that begins with ~/")


class LogConfig(Section, frozen=True):
    """Log level and format."""

    level: LogLevel = "info"
    """Least level of the lines that are written."""
    format: LogFormat = "plain"
    """Form of the lines on stderr: text for people, or a JSON object each."""

    def __post_init__(self) -> None:
        self._one_of("level", LogLevel)
        self._one_of("format", LogFormat)
