"""The server as an application of Ray Serve: replicas of the engine behind one address (docs/ray.md).

    client ─HTTP→ Serve's proxy ─→ Ingress ─a call of Ray, by prefix→ Engine: routes and engine, as without Ray
                                       ←─ parts of the answer ───────

Read `engine.py`, then `ingress.py`. `build.py` makes the application, `launch.py` is `nanovllm serve --ray`.

    serve run nanovllm.extras.serve.ray:build_app model=Qwen/Qwen3-0.6B ray_num_replicas=2
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "build_app":  # when it is used: the options can be read without Ray
        from nanovllm.extras.serve.ray.build import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
