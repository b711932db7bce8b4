"""Hold the options of `nanovllm serve` that are not the engine's, without the packages of the extra `serve`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.serve.parsers.parser_registry import Parsers
from nanovllm_extras.serve.serve_checks import (
    check_api_keys,
    check_names,
    check_origins,
    check_proxies,
    check_root_path,
)

PREFILL_TIMEOUT_S = 60
"""The time in seconds after which a request does not wait for a prefill engine any longer."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of `nanovllm serve` that are not the engine's. Raises ValueError if one of them is invalid."""

    model_names: tuple[str, ...]
    """The names that requests may use. Answers have the first one."""
    api_keys: tuple[str, ...] = ()
    """The allowed keys. If empty, requests need no key."""
    max_request_bytes: int = 16 * 2**20
    max_requests_per_minute: int | None = None
    """The limit for each key, or for each address if there are no keys (for IPv6, for each /64)."""
    max_choices: int = 1024
    """The maximum number of completions of one request: its prompts times `n`."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server (CORS)."""
    drain_timeout_s: float = 60.0
    """The time in seconds that requests in progress have to finish after SIGTERM."""
    root_path: str = ""
    """The path under which a proxy serves this application."""
    log_requests: bool = True
    """Whether the log has a line for each request."""
    parsers: Parsers = Parsers()
    """The parsers of the model's reasoning and tool calls."""
    tls: Mapping[str, Any] = field(default_factory=dict)
    """uvicorn's `ssl_keyfile`, `ssl_certfile`, `ssl_ca_certs`, `ssl_cert_reqs`; empty for plain HTTP."""
    max_request_values: int = 2**19
    """The maximum number of JSON values (numbers, texts, lists, objects) of a body, and of tokens of its prompts."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses or networks of proxies whose headers about the client's address are trusted."""

    lora_modules: tuple[LoRARequest, ...] = ()
    """LoRA adapters that are loaded at the start. Requests have their names as the model."""
    allow_runtime_lora_updating: bool = False
    """Whether adapters can be loaded and unloaded over HTTP."""

    enable_kv_slots: bool = False
    """Whether prompts can be saved and restored by name, at `/slots`."""
    enable_tokenizer_info: bool = False
    """Whether `/tokenizer_info` returns the configuration of the tokenizer, which has the chat template."""
    timeout_keep_alive_s: float = 75.0
    """The time in seconds after which a connection without a request is closed. Longer than that of proxies (60 s)."""

    max_stored_responses: int = 10_000
    """The number of responses that are stored. 0 stores none."""
    max_stored_response_bytes: int = 256 * 2**20
    """The memory of stored responses. 0 stores none."""
    max_stored_response_age_s: float = 86_400.0
    """The time in seconds for which a response is stored. 0 stores none."""

    def __post_init__(self) -> None:
        check_names(self.model_names)
        if both := {one.name for one in self.lora_modules} & {*self.model_names}:
            raise ValueError(f"--lora-modules: {min(both)!r} is a name of the model, too; give the adapter another one")
        check_api_keys(self.api_keys)
        check_origins(self.allowed_origins)
        check_root_path(self.root_path)
        check_proxies(self.forwarded_allow_ips)
