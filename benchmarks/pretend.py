"""Run a command as if the processor had fewer instructions: kernels are compiled without them, and PyTorch uses none.

    python -m benchmarks.pretend avx2 python -m benchmarks.cpu_kernels --batch
    python -m benchmarks.pretend vnni python -m benchmarks.cpu_kernels --batch --rows 1 2 4 8

The memory, the caches and the clock stay those of this machine, so only ratios tell something about another. llama.cpp
chooses its instructions when it is built: cpu_peers.md says how.
"""

import argparse
import os
import shlex
from pathlib import Path

from nanovllm_extras.kernels.cpu.library_cache import cache_folder

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
PROCESSORS = {
    "avx2": ("-march=x86-64-v3 -mtune=generic", AVX2),
    # AVX-VNNI has the instructions of AVX-512 VNNI in another encoding, which this processor may not have.
    "vnni": ("-march=x86-64-v3 -mtune=generic -DVNNI_OF_AVX512", AVX2),
    "avx512": ("-march=native -mno-avx512bf16 -mno-amx-tile -mno-amx-bf16 -mno-amx-int8", AVX512),
}
"""What `-march=native` is replaced by, and the environment variables that PyTorch's libraries read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("processor", choices=PROCESSORS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("a command must follow the processor, such as python -m benchmarks.cpu_kernels --batch")
    flags, variables = PROCESSORS[args.processor]
    compiler = write_compiler(cache_folder() / f"cc-{args.processor}", flags)
    os.execvpe(args.command[0], args.command, {**os.environ, **variables, "CC": shlex.quote(str(compiler))})


def write_compiler(compiler: Path, flags: str) -> Path:
    """Write a script that calls the C compiler with `flags` in place of `-march=native`, and return its path.

    The path is part of a library's name, so the script stays where the libraries are kept.
    """
    real = shlex.quote(os.environ.get("CC") or "gcc")
    replace = 'for flag; do shift; [ "$flag" = -march=native ] || set -- "$@" "$flag"; done'
    compiler.write_text(f'#!/bin/sh\n{replace}\nexec {real} {flags} "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    return compiler


if __name__ == "__main__":
    main()
