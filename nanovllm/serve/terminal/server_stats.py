"""How busy is the server? A few figures of its `/metrics`; their names are vLLM's, behind a prefix that differs."""

import re

SAMPLE = re.compile(r"^(?:\w+:)(\w+)(?:\{[^}]*\})? ([-+.\w]+)", re.MULTILINE)  # prefix:name{label="…"} value


def read_server_stats(text: str) -> dict[str, str]:
    """Of Prometheus' text format; a figure that the server does not have is left out."""
    found: dict[str, float] = {}
    for name, value in SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)  # samples of several labels are added up
    stats = {}
    if "num_requests_running" in found:
        stats["requests"] = (
            f"{found['num_requests_running']:.0f} running, {found.get('num_requests_waiting', 0):.0f} waiting"
        )
    if "kv_cache_usage_perc" in found:
        stats["KV cache"] = f"{found['kv_cache_usage_perc']:.1%} in use"
    if queries := found.get("prefix_cache_queries_total"):
        share = found.get("prefix_cache_hits_total", 0) / queries
        stats["prefix cache"] = f"{share:.0%} of the prompt tokens were hits"
    if "num_preemptions_total" in found:
        stats["preemptions"] = f"{found['num_preemptions_total']:.0f}"
    return stats
