"""Runs the proxy's HTTP server until SIGINT or SIGTERM."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import uvicorn

from disagg.api.listener import bind
from disagg.core.config.read import ApiConfig, Config
from disagg.core.log import configure
from disagg.core.urls import base_url
from disagg.vllm.proxy.app import PairingProxy

log = structlog.get_logger(__name__)


def run_proxy(prefill: Sequence[str], decode: Sequence[str], host: str, port: int, at_once: bool) -> None:
    """Serves until a signal. Raises `ConfigError` for a malformed URL, or an address that cannot be used."""
    proxy = PairingProxy(
        [base_url("--prefill", one) for one in prefill],
        [base_url("--decode", one) for one in decode],
        at_once,
    )
    configure(Config().log)
    with bind(ApiConfig(host=host, port=port)) as listener:
        log.info("proxy_serving", url=f"http://{host}:{listener.getsockname()[1]}", at_once=at_once)
        config = uvicorn.Config(proxy.app(), log_config=None, access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])
