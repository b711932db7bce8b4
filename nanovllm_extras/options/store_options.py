"""`kv_offloading_size` and `kv_transfer_config`: which tiers an engine's store has, by vLLM's names.

    kv_offloading_size=4                     a tier of 4 GiB in host memory
    kv_transfer_config={                     a second tier, which other engines can use too, or a restarted one
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",                kv_producer only saves, kv_consumer only loads
        "kv_connector_extra_config": {"shared_storage_path": "/var/cache/kv", "max_bytes": 100_000_000_000},
    }

`all_options.py` checks them, and `store.py` makes the tiers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nanovllm.checks import check_int
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.option_checks import check_optional_str
from nanovllm_extras.records.tier import Tier

GIB = 1 << 30
DEFAULT_TIER_BYTES = 10 * GIB
ROLES = ("kv_producer", "kv_consumer", "kv_both")
EXTRA_KEYS: Mapping[str, tuple[str, ...]] = {
    "OffloadingConnector": ("cpu_bytes_to_use",),
    "SharedStorageConnector": ("shared_storage_path", "max_bytes"),
    "SharedMemoryConnector": ("name", "max_bytes"),
}
"""Connector -> the keys of its `kv_connector_extra_config`. The first key is required."""
NEEDS_FOLDER = (
    "conversations are saved in the folder of a K/V store: give --kv-transfer-config "
    '\'{"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}\''
)


@dataclass(frozen=True)
class Transfer:
    """A checked `kv_transfer_config`. A bad value raises a TypeError or ValueError that names it."""

    kv_connector: str | Tier | None = None
    """`OffloadingConnector` (host memory), `SharedStorageConnector` (a folder), `SharedMemoryConnector`, a `Tier`."""
    kv_role: str = "kv_both"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kv_role not in ROLES:
            raise ValueError(f"{name_of('kv_role')} must be one of {', '.join(ROLES)}, got {self.kv_role!r}")
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping):
            raise TypeError(f"{name_of('kv_connector_extra_config')} must be a dict, got {extra!r}")
        allowed = () if isinstance(self.kv_connector, Tier) else EXTRA_KEYS.get(self.kv_connector or "")
        if allowed is None:
            names = ", ".join(EXTRA_KEYS)
            raise ValueError(f"{name_of('kv_connector')} must be one of {names}, got {self.kv_connector!r}")
        if self.kv_connector == "OffloadingConnector" and self.kv_role != "kv_both":
            raise ValueError(
                f"{name_of('kv_role')} must be 'kv_both' for OffloadingConnector, got {self.kv_role!r}: no other "
                f"engine can use this engine's host memory"
            )
        where = name_of("kv_connector_extra_config")
        for key in extra:
            if key not in allowed:
                raise ValueError(f"{where} has no key {key!r}; allowed are {', '.join(allowed) or 'none'}")
        if allowed and allowed[0] not in extra:
            raise ValueError(f"{where} must have the key {allowed[0]!r} for {self.kv_connector}")
        for key, value in extra.items():
            if "bytes" in key:
                check_int(f"{where}[{key!r}]", value, 1)
            else:
                check_optional_str(f"{where}[{key!r}]", value, or_path=True)


def name_of(key: str) -> str:
    return f"kv_transfer_config[{key!r}]"


def check_size(name: str, value: object) -> None:
    """Raise unless `value` is a positive number of GiB, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of GiB or None, got {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number of GiB above 0, got {value!r}")


def check_transfer(name: str, value: Mapping[str, object]) -> None:
    read_transfer(value)


FIELD_CHECKS = {"kv_offloading_size": check_size, "kv_transfer_config": check_transfer}


def read_transfer(given: Mapping[str, Any]) -> Transfer:
    """Parse `kv_transfer_config`. Raises TypeError with the legal names for an unknown name."""
    if not isinstance(given, Mapping):
        raise TypeError(f"kv_transfer_config must be a dict or None, got {given!r}")
    legal = [one.name for one in fields(Transfer)]
    for name in given:
        if name not in legal:
            raise TypeError(f"kv_transfer_config has no key {name!r}; legal are {', '.join(legal)}")
    return Transfer(**given)


def option_of(config: Config) -> str:
    """Return the name of the option that gives an engine its store."""
    return "kv_transfer_config" if config.kv_offloading_size is None else "kv_offloading_size"


def check_folder(config: Config) -> None:
    """Raise ValueError if the options of a command line do not give a store in a folder, for saved conversations."""
    transfer = config.kv_transfer_config
    if transfer is None or read_transfer(transfer).kv_connector != "SharedStorageConnector":
        raise ValueError(NEEDS_FOLDER)


def role_of(config: Config) -> str:
    return "kv_both" if config.kv_transfer_config is None else read_transfer(config.kv_transfer_config).kv_role


def as_json(given: Mapping[str, object]) -> dict[str, object]:
    """Return a checked `kv_transfer_config` as JSON can hold it, for another rank."""
    transfer = read_transfer(given)
    extra = {key: str(value) if "path" in key else value for key, value in transfer.kv_connector_extra_config.items()}
    return {**given, "kv_connector_extra_config": extra}


def has_users_tier(config: Config) -> bool:
    """Return whether the last tier is the user's own object, which the engine does not close."""
    transfer = config.kv_transfer_config
    return transfer is not None and isinstance(read_transfer(transfer).kv_connector, Tier)


def is_private(config: Config) -> bool:
    """Return whether no other engine can use the store, so that its keys need not identify the model's weights."""
    transfer = config.kv_transfer_config
    return transfer is None or read_transfer(transfer).kv_connector == "OffloadingConnector"


def smallest_size(config: Config) -> int:
    """Return the bytes of one rank in the smallest tier whose size the options set."""
    sizes = [] if config.kv_offloading_size is None else [int(config.kv_offloading_size * GIB)]
    if config.kv_transfer_config is not None:
        extra = read_transfer(config.kv_transfer_config).kv_connector_extra_config
        sizes += [extra[key] for key in ("cpu_bytes_to_use", "max_bytes") if key in extra]
    return min(sizes, default=DEFAULT_TIER_BYTES) // config.tensor_parallel_size
