"""`EngineArgs`: options in code and from a command line.

Oracle: `Config` itself, made of the same values; the strings below its fields, for the help.
"""

import argparse
import dataclasses

import pytest

from nanovllm.scheduler import Scheduler
from nanovllm_extras import AsyncEngineArgs, Config, EngineArgs
from nanovllm_extras.vllm import engine_args
from nanovllm_extras.vllm.engine_args import GROUPS, ONLY_IN_CODE, descriptions

OPTIONS = [field.name for field in dataclasses.fields(Config)]


def parse(*flags):
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", "a-model", *flags]))


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_they_are_the_options_of_config(kind):
    args = kind("a-model", max_num_seqs=4, tensor_parallel_size=1, num_gpu_blocks_override=9)
    assert args.create_engine_config() == Config("a-model", max_num_seqs=4, num_kv_blocks=9)
    assert dataclasses.asdict(args) == dataclasses.asdict(Config("a-model", max_num_seqs=4, num_kv_blocks=9))
    assert dataclasses.replace(args, seed=3) == kind("a-model", max_num_seqs=4, num_kv_blocks=9, seed=3)


def test_they_can_be_changed_until_a_config_is_made():
    args = EngineArgs("a-model")
    args.max_num_seqs = 7
    args.num_gpu_blocks_override = 9
    args.pipeline_parallel_size = 1
    config = args.create_engine_config()
    args.max_num_seqs = 8
    assert config == Config("a-model", max_num_seqs=7, num_kv_blocks=9)
    with pytest.raises(ValueError, match="pipeline_parallel_size=2"):
        args.pipeline_parallel_size = 2
    with pytest.raises(TypeError, match="unknown argument max_seqs"):
        args.max_seqs = 2
    args.max_num_seqs = 0
    with pytest.raises(ValueError, match="max_num_seqs must be"):
        args.create_engine_config()


FLAGS = [
    (["--max-num-seqs", "7"], {"max_num_seqs": 7}),
    (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
    (["--dtype", "float32", "--device", "cpu"], {"dtype": "float32", "device": "cpu"}),
    (["--enforce-eager", "--no-enable-prefix-caching"], {"enforce_eager": True, "enable_prefix_caching": False}),
    (["--no-enable-overlap"], {"enable_overlap": False}),
    (["--scheduler-cls", "nanovllm.scheduler:Scheduler"], {"scheduler_cls": Scheduler}),
    (["--hf-overrides", '{"rope_theta": 5e5}'], {"hf_overrides": {"rope_theta": 5e5}}),
    (["--num-gpu-blocks-override", "9", "--async-scheduling"], {"num_kv_blocks": 9, "enable_overlap": True}),
    (["--pipeline-parallel-size", "1", "--swap-space", "0", "--disable-log-stats"], {}),
    (["--quantization", "None", "--enable-chunked-prefill", "--max-logprobs", "3"], {}),
]


def test_flags():
    for flags, options in [([], {}), *FLAGS]:
        assert parse(*flags) == EngineArgs("a-model", **options), flags
    args = argparse.Namespace(model="a-model", seed=3, port=8000, host=None)  # others are somebody else's
    assert EngineArgs.from_cli_args(args) == EngineArgs("a-model", seed=3)


def test_bad_flags(capsys):
    with pytest.raises(ValueError, match="pipeline_parallel_size=2 is not supported"):
        parse("--pipeline-parallel-size", "2")
    with pytest.raises(ValueError, match="trust_remote_code=True is not supported"):
        parse("--trust-remote-code")
    with pytest.raises(ValueError, match="max_num_seqs must be an integer >= 1, got 0"):
        parse("--max-num-seqs", "0")
    for flags in (["--max-num-seqs", "x"], ["--hf-overrides", "{"], ["--max-seqs", "3"]):
        with pytest.raises(SystemExit):
            parse(*flags)
    assert "not JSON" in capsys.readouterr().err


def test_every_option_is_in_one_group_and_has_a_description():
    assert sorted([*" ".join(GROUPS.values()).split(), *ONLY_IN_CODE]) == sorted(OPTIONS)
    assert list(descriptions()) == OPTIONS
    assert descriptions()["max_num_seqs"] == "Sequences that run at the same time."


def test_the_help_shows_each_option_of_ours_and_hides_the_others(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    words = " ".join(capsys.readouterr().out.split())
    for name in sorted({*OPTIONS} - {*ONLY_IN_CODE}):
        assert f"--{name.replace('_', '-')}" in words
        assert descriptions()[name].split(".")[0].split("/")[0][:40] in words
    for title in GROUPS:
        assert f"{title}:" in words
    assert "pipeline-parallel" not in words


def test_without_source_files_the_help_names_a_page(monkeypatch, capsys):
    """An installation may have only compiled files, which hold no strings below fields."""
    monkeypatch.setattr(engine_args, "descriptions", dict)
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    assert "see docs/options.md" in " ".join(capsys.readouterr().out.split())
