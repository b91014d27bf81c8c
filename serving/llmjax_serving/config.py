"""Configuration of the HTTP side; every default is stated here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.config import check_types
from llmjax.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side of a server.

    Attributes:
        host: address to listen on; 0.0.0.0 is every interface.
        port: TCP port; 0 takes a free one.
        uds: path of a Unix socket to listen on, in place of host and port.
        ssl_certfile: PEM file of the certificate (and those that vouch for it): the server speaks
            TLS. It is read again as it changes.
        ssl_keyfile: PEM file of its private key; by default `ssl_certfile` has that too.
        api_key: keys of which clients must send one as a bearer token, or as x-api-key; by default
            everyone is let in.
        api_key_file: JSON, a list of keys with their names and limits; read again as it changes.
        usage_db: SQLite file that keeps what each key has used; by default that is known since
            the start only.
        allowed_origins: web origins whose pages may call; "*" is all of them.
        shutdown_timeout: seconds that running requests get to end after SIGTERM.
        max_body_bytes: the largest request body.
        max_total_body_bytes: the most that the bodies of all requests at hand take; what comes
            beyond that is told to try again.
        client_timeout: seconds that a client may take to send a request's headers, then its body,
            to go on reading an answer, and to stay connected without asking for anything.
        access_log_format: "text", or "json": a line about each request is an object.
        files_dir: folder that keeps what clients upload to /v1/files and what comes of their
            batches; by default there are none.
        metrics_alias: "vllm": /metrics tells everything under the prefix vllm: too, for
            dashboards and alerts made for it.
        trust_request_chat_template: requests may bring a chat template of their own, which can keep
            a thread busy for as long as it likes.
        log_stats_interval: seconds between two log lines about throughput, queue and pages, while
            there is work; 0 is none.
        api_server_count: processes that read requests, tokenise and stream answers, beside the one
            that computes; 1 does all of it in one.
        otlp_traces_endpoint: where OpenTelemetry spans of requests are sent to; by default there
            are none. It takes llmjax[otel].
        max_stored_responses: answers of /v1/responses that clients can come back to; those least
            recently used are forgotten first.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    usage_db: str | None = None
    allowed_origins: tuple[str, ...] = ("*",)
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 32 * 2**20
    max_total_body_bytes: int = 256 * 2**20
    client_timeout: float = 60.0
    access_log_format: str = "text"
    files_dir: str | None = None
    metrics_alias: str | None = None
    trust_request_chat_template: bool = False
    log_stats_interval: float = 10.0
    api_server_count: int = 1
    otlp_traces_endpoint: str | None = None
    max_stored_responses: int = 1000

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key) or self.api_key_file is not None

    def __post_init__(self) -> None:
        check_types(self)
        ranges = (
            *(("port", 0, 65535), ("shutdown_timeout", 0, 86400), ("max_body_bytes", 1, 2**40)),
            *(("log_stats_interval", 0, 86400), ("client_timeout", 0.1, 86400)),
            *(("api_server_count", 1, 64), ("max_stored_responses", 0, 10**6)),
            ("max_total_body_bytes", self.max_body_bytes, 2**43),
        )
        for name, least, most in ranges:
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}, allowed: {least} to {most}")
        if self.metrics_alias not in (None, "vllm"):
            raise ConfigError(f"metrics_alias is {self.metrics_alias!r}, allowed: vllm, or none")
        if self.access_log_format not in ("text", "json"):
            raise ConfigError(
                f"access_log_format is {self.access_log_format!r}, allowed: text, json"
            )
        if self.uds is not None and (self.host, self.port) != (type(self).host, type(self).port):
            raise ConfigError("uds and host or port were given, allowed: one place to listen on")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        if not all(self.api_key) or len(set(self.api_key)) < len(self.api_key):
            raise ConfigError("api_key has an empty key, or one twice, allowed: keys that differ")
