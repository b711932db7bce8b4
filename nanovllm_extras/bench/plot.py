"""Draw a picture of several loads of one server: latency against the rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm_extras.bench.report import METRICS


def plot(runs: Sequence[Mapping[str, Any]], metrics: Sequence[str], percentiles: Sequence[float], path: Path) -> None:
    """Draw a panel for each metric, with a line for each percentile and a mark for each rate, and one for throughput.

    The horizontal axis is the rate at which requests were answered. A load with the rate `inf` shows the server's
    limit.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = sorted(runs, key=lambda run: run["request_throughput"])
    rates = [run["request_throughput"] for run in runs]
    figure, axes = pyplot.subplots(1, len(metrics) + 1, figsize=(3.6 * (len(metrics) + 1), 3.4), layout="constrained")
    for axis, metric in zip(axes, metrics, strict=False):
        for percentile in percentiles:
            name = f"p{percentile:g}"
            axis.plot(rates, [run[f"{name}_{metric}_ms"] for run in runs], marker="o", markersize=4, label=name)
        axis.set(title=METRICS[metric], ylabel="milliseconds", ylim=(0, None))
        axis.legend()
    axes[-1].plot(rates, [run["output_throughput"] for run in runs], marker="o", markersize=4, color="black")
    axes[-1].set(title="Throughput", ylabel="output tokens per second", ylim=(0, None))
    for axis in axes:
        axis.set(xlabel="requests answered per second", xlim=(0, None))
        axis.grid(alpha=0.3)
    figure.suptitle(", ".join(str(runs[0][key]) for key in ("label", "model_id") if runs[0].get(key)))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
