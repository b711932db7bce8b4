"""Shared fixtures: random small Qwen3 checkpoints, made with `transformers`, which is the oracle too."""

import functools
import gc
import itertools
import os
import pathlib
import re
import shutil
import signal
import sys

import pytest

from tests.broken_checkpoint import broken  # noqa: F401 (a fixture)
from tests.hub_cache import hub_cache  # noqa: F401 (a fixture)

os.environ["NANOVLLM_SELF_CHECK"] = "off"  # the models are random, and their shapes many: no result is ever found again
os.environ["OMP_NUM_THREADS"] = "1"  # processes that tests start do not want to wait for each other either
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def every_second(values):
    """Parameters of which the default run takes the first, the third and so on, and the sweep the others."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (i % 2)) for i, value in enumerate(values)]


def has_extras():
    """Whether nanovllm_extras is there: CI runs the core's own tests in a copy without it."""
    import nanovllm

    return (pathlib.Path(nanovllm.__file__).parents[1] / "nanovllm_extras").exists()


def examples(n):
    """For hypothesis: all of them in a sweep (`pytest -m slow`), an eighth by default."""
    return n if os.environ.get("NANOVLLM_SWEEP") else max(1, n // 8)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ or not getattr(config.option, "numprocesses", None):
        prepare_libraries()
    # Extensions complain at the end of what was never collected. It is undone after pytest's own five searches for
    # garbage, since what is cleaned up first was registered last.
    config.add_cleanup(gc.unfreeze)
    gc.freeze()
    # A script starts what runs in its background with these ignored, and so would be what tests start and interrupt.
    for name, default in (("SIGINT", signal.default_int_handler), ("SIGQUIT", signal.SIG_DFL)):
        number = getattr(signal, name, None)  # Windows has no SIGQUIT
        if number and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)
    if config.option.markexpr == "slow":
        os.environ.setdefault("NANOVLLM_SWEEP", "1")  # read by `examples`, in the processes of pytest-xdist too


def prepare_libraries():
    """Set up what tests use. The process that only hands out tests to others does not import it: it takes seconds."""
    import torch
    import transformers

    from nanovllm import model_runner

    torch.set_num_threads(1)  # on models this small a second thread only waits for the first
    transformers.utils.logging.disable_progress_bar()
    model_runner.CPU_KV_CACHE_BYTES = 64 << 20  # to fill a gigabyte with zeros takes longer than most tests


def has_gpu():
    if sys.platform == "linux" and not any(map(os.path.exists, GPU_DEVICES)):
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite runs in as many processes as there are cores. Files and tests by name run in this one, where they
    begin sooner and can be debugged, and so does everything beside a GPU, whose memory is one for all.
    """
    options = config.option
    is_whole = config.args_source is config.ArgsSource.TESTPATHS and not options.keyword
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or not is_whole or not config.pluginmanager.hasplugin("xdist") or has_gpu():
        return
    if options.numprocesses is None and not options.usepdb and options.capture != "no":
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if num_cores > 1:
            options.numprocesses, options.dist = min(num_cores, 8), "worksteal"


def pytest_ignore_collect(collection_path, config):
    """A file whose tests all have a mark that this run leaves out is not imported: some need libraries of their own."""
    left_out = re.findall(r"not (\w+)", config.option.markexpr)
    if collection_path.suffix == ".py" and left_out:
        marks = re.search(r"^pytestmark = (\[$.*?^\]|.*?$)", collection_path.read_text(encoding="utf-8"), re.M | re.S)
        if marks and any(re.search(rf"mark\.{mark}\b", marks[1]) for mark in left_out):
            return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports make a million objects that stay: Python's collector need not look for garbage among them meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The default run takes a few cases of a test with the mark `sparse`: these meet each value of each parameter; with
    `sparse(2)`, each pair of values of two parameters. Of a large grid, the sweep takes the fewest of the other cases
    that meet each pair of values, or each value with the mark `thinned`; with NANOVLLM_SWEEP=all it takes all. A test
    with the mark `examples` is in the sweep as well, and one with the mark `triton` only there. Those with the mark
    `long` begin first: no process still runs one at the end while others are idle. Those with the mark `gpu` are
    skipped where there is none.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    grids, slow_grids = {}, {}
    for item in items:
        if item.get_closest_marker("triton"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("examples") and os.environ.get("NANOVLLM_SWEEP"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("sparse") and not item.get_closest_marker("slow"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        size = next(iter(cases[0].get_closest_marker("sparse").args), 1)
        for case in beyond_a_covering_choice(cases, size):
            case.add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("slow"):
            slow_grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for cases in slow_grids.values():
        if len(cases) >= LARGE_GRID and hasattr(cases[0], "callspec"):
            size = 1 if cases[0].get_closest_marker("thinned") else 2
            left_out |= beyond_a_covering_choice(cases, size)
    if left_out and os.environ.get("NANOVLLM_SWEEP") != "all":
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


LARGE_GRID = 6  # cases of a test in the sweep


def beyond_a_covering_choice(cases, size):
    """Return the cases that others make unnecessary: those meet each combination of values of `size` parameters."""
    unmet = {}
    for case in cases:
        values = sorted((name, repr(value)) for name, value in case.callspec.params.items())
        unmet[case] = set(itertools.combinations(values, min(size, len(values))))
    while any(unmet.values()):
        met = unmet.pop(max(unmet, key=lambda case: len(unmet[case])))
        unmet = {case: combinations - met for case, combinations in unmet.items()}
    return set(unmet)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What has been imported stays, so Python's collector need not look at its million objects again and again.

    After `freeze` few old objects are left, so Python would look through them all at every tenth occasion."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def _leave_the_gpu_as_it_was():
    """What a test held there goes when it ends: other processes may test on the same GPU."""
    import torch

    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def pytest_runtest_makereport(item, call):
    """After a fault on a GPU its process can do nothing more there; pytest-xdist starts another for the other tests."""
    if call.excinfo is not None and "CUDA error" in str(call.excinfo.value) and "PYTEST_XDIST_WORKER" in os.environ:
        print(f"{item.nodeid}: {call.excinfo.value}", file=sys.__stderr__, flush=True)
        os._exit(1)


@pytest.fixture(scope="module")
def little_to_search():
    """For tests that look for garbage, each a fifth of a second among a million objects that others have imported."""
    gc.collect()
    gc.freeze()


SMALL_POOL, LARGE_POOL = 100, 2000  # blocks; to look at each of many after each step would take longer than the step


@pytest.fixture(scope="session", autouse=True)
def _invariants_after_each_step():
    """The engines of all tests, of both packages, do what `check_invariants=True` asks for, if their pools are small.

    With more than a few blocks every fourth step does: what is wrong in a pool stays so. Tests that interrupt a step at
    any line mean the lines of the engine, so nothing is checked while they trace.
    """
    if not has_extras():
        yield
        return
    from nanovllm.engine import LLMEngine
    from nanovllm_extras.engine.invariants import check_invariants

    unchecked_step, counter = LLMEngine.step, itertools.count()

    @functools.wraps(unchecked_step)
    def step(engine):
        outputs = unchecked_step(engine)
        num_blocks = engine.scheduler.block_manager.num_blocks
        is_due = num_blocks <= SMALL_POOL or (num_blocks <= LARGE_POOL and next(counter) % 4 == 0)
        if is_due and sys.gettrace() is None:
            check_invariants(engine)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "step", step)
        yield


class TinyCheckpoints:
    """Random Qwen3 checkpoints on disk, one for each shape, with the `transformers` model that wrote it."""

    def __init__(self, root):
        self._root = root

    @functools.cache  # noqa: B019 (lives as long as the test session)
    def make(self, seed=0, **shape):
        """(folder, transformers model in float32); `shape` overrides fields of Qwen3Config."""
        import torch
        import transformers

        defaults = {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,  # large, so that greedy outputs vary and margins are wide
        }
        config = transformers.Qwen3Config(**{**defaults, **shape}, bos_token_id=None, eos_token_id=None)
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config).eval()
        folder = self._root / f"qwen3-{len(list(self._root.iterdir()))}"
        model.save_pretrained(folder)
        return folder, model


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Run a benchmark or calculator as its command does; returns the lines that it prints."""

    def run(module, *arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoints):
    """(folder, transformers model) of the default shape: two layers, 4 heads over 2 kv heads of 32."""
    return checkpoints.make()


@pytest.fixture(scope="session")
def with_tokenizer(tiny_checkpoint, tmp_path_factory):
    """`tiny_checkpoint` with a tokenizer of single bytes: 256 tokens and one special; the model has 300."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("bytes") / "model"
    shutil.copytree(tiny_checkpoint[0], folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0, **{letter: i for i, letter in enumerate(alphabet, start=1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


def hf_greedy(model, prompt_token_ids, max_tokens):
    """Greedy completion of one prompt by `transformers`: a list of token ids."""
    import torch

    input_ids = torch.tensor([prompt_token_ids])
    with torch.no_grad():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt_token_ids) :].tolist()
