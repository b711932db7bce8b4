"""Run the server as an application of Ray Serve: several replicas of the engine behind one address (docs/ray.md).

    client ─HTTP→ Serve's proxy ─→ Ingress ─a call of Ray, by prefix→ Engine: routes and engine, as without Ray
                                       ←─ parts of the answer ───────

Read `ray_engine.py`, then `ingress.py`. `build.py` creates the application; `ray_launch.py` is `nanovllm serve --ray`.
With prefill replicas, `ingress.py` calls two deployments, as `disaggregation.py` decides.

    serve run nanovllm_extras.serve.ray:build_app model=Qwen/Qwen3-0.6B ray_num_replicas=2
"""


def __getattr__(name: str) -> object:
    if name == "build_app":  # imported only when it is used, because the options must be readable without Ray
        from nanovllm_extras.serve.ray.build import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
