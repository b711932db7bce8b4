"""`ranks.h` under ThreadSanitizer: threads as ranks, whose every access to shared memory is checked for an order."""

import os
import shutil
import subprocess

import pytest

from nanovllm_extras.kernels.cpu.library import SOURCE

PROGRAM = r"""
#include <pthread.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>
#include "ranks.h"

enum { SIZE = 3, BUFFER = 1024, COUNT = 700 };
static _Alignas(128) struct post posts[SIZE];
static _Alignas(64) char buffers[SIZE * 2 * BUFFER];

// At once: the other ranks would wait for this one.
static void fail(const char *why) {
    puts(why);
    fflush(stdout);
    _exit(1);
}

static void *run(void *argument) {
    const long rank = (long)argument;
    struct ranks r = {posts, buffers, rank, SIZE, BUFFER, ROUNDS_SPIN, 0};
    element x[COUNT], all[SIZE * COUNT];
    for (int i = 0; i < ROUNDS; i++) {
        for (int j = 0; j < COUNT; j++) x[j] = rank + i + j;
        if (all_reduce(&r, x, COUNT)) fail("aborted");
        for (int j = 0; j < COUNT; j++) if (x[j] != SIZE * (i + j) + 3) fail("a wrong sum");
        if (gather(&r, (char *)x, rank ? NULL : (char *)all, 2, sizeof x / 2)) fail("aborted");
        for (int j = 0; !rank && j < SIZE * COUNT; j++)
            if (all[j] != x[j / (SIZE * COUNT / 2) * (COUNT / 2) + j % (COUNT / 2)]) fail("a wrong gather");
        x[0] = rank;
        if (broadcast(&r, (char *)x, sizeof x)) fail("aborted");
        if (x[0] != 0) fail("a wrong broadcast");
    }
    return NULL;
}

int main(void) {
    pthread_t threads[SIZE];
    for (long rank = 0; rank < SIZE; rank++) pthread_create(&threads[rank], NULL, run, (void *)rank);
    for (long rank = 0; rank < SIZE; rank++) pthread_join(threads[rank], NULL);
    return 0;
}
"""


def run_program(folder, header, spin_ns, rounds):
    """-> what it has printed, of failures and races"""
    source, program = folder / "races.c", folder / "races"
    source.write_text(PROGRAM)
    (folder / "ranks.h").write_text(header)
    flags = ["-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-Wno-psabi"]
    flags += [f"-DROUNDS_SPIN={spin_ns}", f"-DROUNDS={rounds}"]
    includes = [f"-I{folder}", f"-I{SOURCE.parent}"]
    built = subprocess.run(
        ["cc", *flags, *includes, str(source), "-o", str(program), "-lm", "-lpthread"], capture_output=True, text=True
    )
    if built.returncode:
        pytest.skip(f"no ThreadSanitizer here: {built.stderr[-300:]}")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=100, env={**os.environ})
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("spin_ns", "rounds"), [(0, 700), (50_000, 100)])  # threads that spin take 30 times as long
def test_no_race(tmp_path, spin_ns, rounds):
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    header = (SOURCE.parent / "ranks.h").read_text(encoding="utf-8")
    assert run_program(tmp_path, header, spin_ns, rounds) == ""
    relaxed = header.replace("__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED").replace("__ATOMIC_SEQ_CST", "__ATOMIC_RELAXED")
    assert "data race" in run_program(tmp_path, relaxed, spin_ns, rounds), "the test sees an order that is missing"
    one_buffer = header.replace("rank * 2 + r->round % 2", "rank * 2")
    assert one_buffer != header
    found = run_program(tmp_path, one_buffer, spin_ns, rounds)
    assert "data race" in found or "wrong" in found, "and a buffer that is written while others read it"
