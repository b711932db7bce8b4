"""Python imports this file first where its folder is in PYTHONPATH: it plants a fault in the process of a rank.

NANOVLLM_TEST_FAULT is a JSON object with
    processor: where in the rank's work, one of `STAGES`
    kind: what happens there, one of `KINDS`
    skip: how often the processor passes before
    mark: a file that gets the time of the fault
"""

import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import time

FAULT = "NANOVLLM_TEST_FAULT"
WORKER = "nanovllm_extras.parallel.worker"


class AfterImport(importlib.abc.MetaPathFinder):
    """Plants the fault when the worker's module has been imported."""

    def find_spec(self, name, path, target=None):
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        exec_module = spec.loader.exec_module

        def exec_and_plant(module):
            exec_module(module)
            plant(module, json.loads(os.environ[FAULT]))

        spec.loader.exec_module = exec_and_plant
        return spec


def plant(worker, fault):
    if fault["processor"] == "import":
        strike(fault)
        return
    from nanovllm.layers.attention import Attention
    from nanovllm_extras.parallel import joined
    from nanovllm_extras.parallel import start_ranks as start

    owner, name = {
        "plan": (worker, "start_worker"),
        "connect": (start, "connect"),
        "load": (start.RankPart, "load_network"),
        "prepare": (start.RankDevice, "prepare"),
        "message": (worker, "unpack_step"),
        "embedding": (joined.VocabularyShare, "forward"),
        "attention": (Attention, "forward"),
        "logits": (joined.VocabularyShare, "logits"),
        "draw": (start, "draw_nothing"),
        "reader": (worker, "compute_logits"),
    }[fault["processor"]]
    function, left = getattr(owner, name), [fault.get("skip", 0)]

    def planted(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            strike(fault)
        return function(*arguments, **options)

    setattr(owner, name, planted)


def strike(fault):
    with open(f"{fault['mark']}.{os.getpid()}", "w") as mark:  # several ranks may come here
        json.dump({"time": time.monotonic(), "pid": os.getpid()}, mark)
    os.replace(mark.name, fault["mark"])
    KINDS[fault["kind"]]()


def run_out_of_memory():
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, -1))  # less than the process has already
    kept = []
    while True:
        kept.append(torch.ones(1 << 24))


def fail():
    raise RuntimeError("planted")


def fail_for_memory():
    raise MemoryError("planted")


def fail_self_check():
    from nanovllm_extras.machine.own_process import SelfCheckError

    raise SelfCheckError("planted")


KINDS = {
    "self-check": fail_self_check,
    "raise": fail,
    "MemoryError": fail_for_memory,
    "no memory": run_out_of_memory,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "exit": lambda: sys.exit(3),
    "wait": lambda: time.sleep(600),
}

if FAULT in os.environ and any(argument.endswith("nanovllm_extras/parallel/rank.py") for argument in sys.orig_argv):
    sys.meta_path.insert(0, AfterImport())
