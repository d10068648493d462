"""ServerConfig: the settings of the HTTP server. The flags of `quire serve` are made from its fields."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import option
from quire.errors import InvalidParams

MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, API keys, limits, timeouts and TLS."""

    host: str = option("127.0.0.1", "Address to listen on; the default is reached from this machine only.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", "PORT")
    api_key: str | None = option(
        None, "Clients must send this key; $QUIRE_API_KEY if not set. Without a key, every request is accepted."
    )
    api_key_file: str | None = option(None, "A file of keys, a line each: NAME KEY. Each name is a tenant of its own.")
    replicas: int = option(
        1, "Engines that share the requests: each has the model, and a GPU or a share of the CPU's threads of its own."
    )
    served_model_name: str | None = option(None, "What clients call the model; MODEL if not set.")
    max_queue_requests: int = option(16_384, "Requests that may wait; more are refused, with a Retry-After (429).")
    max_queue_tokens: int = option(
        16_777_216, "Prompt tokens that may wait; more are refused, with a Retry-After (429)."
    )
    request_timeout: float = option(
        600.0, "Seconds a request may take in all, waiting included; then it is aborted.", "SECONDS"
    )
    drain_timeout: float = option(60.0, "Seconds that running requests have to finish after SIGTERM.", "SECONDS")
    stall_timeout: float = option(120.0, "Seconds without a reply after which the engine is restarted.", "SECONDS")
    max_body_bytes: int = option(4_194_304, "Longest request body; longer ones are refused (413).", "BYTES")
    max_header_bytes: int = option(65_536, "Longest request line and headers; longer ones are refused (431).", "BYTES")
    read_timeout: float = option(
        60.0, "Seconds a client has to send a request's headers, and again for its body (408).", "SECONDS"
    )
    max_prompts: int = option(128, "Prompts in one request.")
    allow_request_templates: bool = option(False, "Accept requests with their own chat template.")
    console: bool = option(True, "Show what the engines do, at /console and to `quire top`.")
    log_requests: bool = option(True, "Write a line for every request, as JSON, on standard error.")
    trace: str | None = option(None, "Record requests, steps and answers into this new file, for quire trace.", "FILE")
    trace_anonymous: bool = option(False, "Record lengths and digests instead of tokens, texts and parameters' texts.")
    cors_origins: str | None = option(
        None, "Origins of web pages that may send requests, with commas; none if not set.", "ORIGIN,..."
    )
    tls_cert: str | None = option(None, "Certificate chain (PEM) to serve HTTPS with; needs --tls-key.", "FILE")
    tls_key: str | None = option(None, "Private key (PEM) of --tls-cert.", "FILE")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidParams(f"port is {self.port}; give a number from 0 to 65535.")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise InvalidParams(f"replicas is {self.replicas}; give a whole number from 1 to {MAX_REPLICAS}.")
        for name in ("max_queue_requests", "max_queue_tokens", "max_body_bytes", "max_header_bytes", "max_prompts"):
            if getattr(self, name) < 1:
                raise InvalidParams(f"{name} is {getattr(self, name)}; give a whole number of at least 1.")
        for name in ("request_timeout", "drain_timeout", "stall_timeout", "read_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidParams(f"{name} is {getattr(self, name)}; give a number of seconds above 0.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidParams("tls_cert and tls_key go together; give both or neither.")
        if self.trace_anonymous and self.trace is None:
            raise InvalidParams("trace_anonymous needs trace, the file to record into; give it, or leave both out.")
        if self.api_key is not None and self.api_key_file is not None:
            raise InvalidParams("Give api_key or api_key_file, not both.")
