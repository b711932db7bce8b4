"""Add up vectors of several devices in a ring, as NCCL does in each layer of a tensor-parallel network.

    python -m labs.demos.ring             # three devices
    python -m labs.demos.ring 4

Each device has a part of the sum. The vectors are cut into as many chunks as there are devices. In the first half of
the steps (reduce-scatter), each device sends one chunk to the right, and the neighbour adds it to its own. Then each
device has the whole sum of one chunk. In the second half (all-gather), these sums travel around the ring.
"""

import argparse

Vector = list[int]


def ring_all_reduce(vectors: list[Vector]) -> list[list[Vector]]:
    """Return all vectors after each step; the first entry is before the first step. Chunk i has one number, i."""
    num_devices = len(vectors)
    history = [vectors]
    for step in range(2 * (num_devices - 1)):
        is_adding = step < num_devices - 1
        before = history[-1]
        after = [list(vector) for vector in before]
        for device in range(num_devices):
            chunk, receiver = (device - step) % num_devices, (device + 1) % num_devices
            after[receiver][chunk] = before[device][chunk] + (before[receiver][chunk] if is_adding else 0)
        history.append(after)
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description="An all-reduce in a ring, step by step.")
    parser.add_argument("num_devices", type=int, nargs="?", default=3, help="devices, from 2 to 6 (default: 3)")
    args = parser.parse_args()
    num_devices = args.num_devices
    if not 2 <= num_devices <= 6:
        parser.error(f"num_devices must be from 2 to 6, got {num_devices}")
    vectors = [[10**device * (chunk + 1) for chunk in range(num_devices)] for device in range(num_devices)]
    history = ring_all_reduce(vectors)
    width = max(len(str(vector)) for state in history for vector in state) + 2
    print(f"{'':<18}" + "".join(f"{f'device {device}':<{width}}" for device in range(num_devices)).rstrip())
    for step, state in enumerate(history):
        half = "reduce-scatter" if step < num_devices else "all-gather"
        name = "start" if step == 0 else f"{step} {half}"
        print(f"{name:<18}" + "".join(f"{vector!s:<{width}}" for vector in state).rstrip())
    sent = 2 * (num_devices - 1)
    print(f"\neach device has sent {sent} of {num_devices} chunks: {sent / num_devices:.2f} times its vector")


if __name__ == "__main__":
    main()
