"""From the options of a K/V store to its tiers."""

from nanovllm_extras.kv_store.disk_tier import DiskTier
from nanovllm_extras.kv_store.memory_tier import MemoryTier
from nanovllm_extras.kv_store.shared_tier import SharedTier
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.store_options import DEFAULT_TIER_BYTES, GIB, read_transfer
from nanovllm_extras.records.tier import Tier


def make_tiers(config: Config) -> list[Tier]:
    """Return the tiers of one rank, from fast to slow.

    Each rank has its part of the host memory. A folder and shared memory are used by all ranks.
    """
    tiers: list[Tier] = []
    if config.kv_offloading_size is not None:
        tiers.append(MemoryTier(int(config.kv_offloading_size * GIB) // config.tensor_parallel_size))
    if config.kv_transfer_config is None:
        return tiers
    transfer = read_transfer(config.kv_transfer_config)
    connector, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if isinstance(connector, Tier):
        return [*tiers, connector]
    if connector == "OffloadingConnector":
        return [MemoryTier(extra["cpu_bytes_to_use"] // config.tensor_parallel_size)]
    max_bytes = extra.get("max_bytes", DEFAULT_TIER_BYTES)
    if connector == "SharedStorageConnector":
        return [*tiers, DiskTier(extra["shared_storage_path"], max_bytes)]
    return [*tiers, SharedTier(extra["name"], max_bytes)]
