"""`team.h`: loops that threads share, callers that compute at the same time, and waiting beside other processes."""

import os
import shutil
import subprocess
import sys

import pytest

from nanovllm_extras.kernels.cpu.library import SOURCE, bound_cpus

PROGRAM = r"""
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static long planted;  // interruptions that the kernel reports
static int planted_getrusage(int who, struct rusage *usage) {
    (void)who;
    return usage->ru_nivcsw = planted, 0;
}
#define getrusage planted_getrusage
static long num_created, most_created = 1000;
#define pthread_create(...) (num_created++ < most_created ? (pthread_create)(__VA_ARGS__) : 11)
#include "team.h"

enum { COUNT = 1000, CALLERS = 3 };
static int num_threads = 4;
static int count(void) { return num_threads; }

struct visits {
    long visits[COUNT];
    long least, most, by_thread[8];
    int num_expected;  // threads; the first pieces wait for them, for ten seconds at most
    long num_waits;
};

static int count_sharing(const struct visits *v) {
    int sharing = 0;
    for (int thread = 0; thread < 8; thread++) sharing += __atomic_load_n(&v->by_thread[thread], __ATOMIC_RELAXED) > 0;
    return sharing;
}

static void visit(const void *arguments, long first, long last, int thread) {
    struct visits *v = (struct visits *)arguments;
    if ((last - first < v->least && last != COUNT) || last - first > v->most) _exit(2);
    for (long i = first; i < last; i++) v->visits[i]++;
    __atomic_add_fetch(&v->by_thread[thread], 1, __ATOMIC_RELAXED);
    while (count_sharing(v) < v->num_expected && __atomic_fetch_add(&v->num_waits, 1, __ATOMIC_RELAXED) < 100000)
        usleep(100);
    if (v->num_expected) usleep(2000);  // for a thread that should not be there
}

// Compute loops, and check after each that every item was visited once.
static void *compute(void *argument) {
    for (long loop = 0; loop < LOOPS; loop++) {
        struct visits v = {.least = 1 + loop % 300, .most = loop % 2 ? COUNT : 1 + loop % 300};
        parallel_for(visit, &v, COUNT, v.least, v.most);
        for (long i = 0; i < COUNT; i++) if (v.visits[i] != 1) { puts("not once"); fflush(stdout); _exit(1); }
        if (loop % 100 == 0) usleep(1000);  // longer than the threads spin
    }
    return argument;
}

static void threads_share(int num_expected) {
    struct visits v = {.least = 10, .most = 10, .num_expected = num_expected};
    parallel_for(visit, &v, COUNT, v.least, v.most);
    printf("%d threads, %d workers\n", count_sharing(&v), own_team.num_workers);
}

int main(int argc, char **argv) {
    const char *what = argv[argc - 1];
    join_team(NULL, count, NULL, 0);
    if (!strcmp(what, "callers")) {
        pthread_t callers[CALLERS];
        for (int i = 0; i < CALLERS; i++) (pthread_create)(&callers[i], NULL, compute, NULL);
        for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    } else if (!strcmp(what, "refused")) {
        most_created = 1;
        threads_share(2);
        threads_share(2);
        printf("%ld attempts\n", num_created);
    } else if (!strcmp(what, "fewer")) {
        threads_share(4);
        num_threads = 2;
        threads_share(2);
        num_threads = 1;
        struct visits v = {.most = COUNT};
        parallel_for(visit, &v, COUNT, 1, 1);
        printf("%ld by the caller\n", v.by_thread[0]);
    } else if (!strcmp(what, "interruptions")) {
        const long start = 1000000000, ms = 1000000;
        look_around(&own_team, start);
        for (planted = 1; planted <= 4; planted++) {  // the second and third follow within 20 ms
            const long at[] = {0, 50, 55, 70, 300};
            look_around(&own_team, start + at[planted] * ms);
            printf("%ld ", spin_ns(&own_team, start + at[planted] * ms) / 1000);
        }
        printf("%ld\n", spin_ns(&own_team, start + 171 * ms) / 1000);
    }
    return 0;
}
"""


def build_program(folder, *flags, header=None):
    """Compile the program, with another `team.h` if `header` is given, and return its path."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("there is no C compiler")
    (folder / "team.c").write_text(PROGRAM)
    (folder / "team.h").write_text(header or (SOURCE.parent / "team.h").read_text(encoding="utf-8"))
    program = folder / "team"
    command = [compiler, "-std=gnu11", "-O1", "-g", "-pthread", *flags, str(folder / "team.c"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "-fsanitize=thread" in flags:
        pytest.skip(f"no ThreadSanitizer here: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stderr
    return program


def run_program(program, what):
    """-> what the program has printed"""
    done = subprocess.run([str(program), what], capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_program(tmp_path_factory.mktemp("team"), "-DLOOPS=2000")


def test_each_item_is_computed_once_by_callers_at_the_same_time(program):
    assert run_program(program, "callers") == ""


@pytest.mark.slow
def test_no_race(tmp_path):
    flags = ("-fsanitize=thread", "-DLOOPS=400")
    header = (SOURCE.parent / "team.h").read_text(encoding="utf-8")
    assert run_program(build_program(tmp_path, *flags), "callers") == ""
    relaxed = header.replace("__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED").replace("__ATOMIC_SEQ_CST", "__ATOMIC_RELAXED")
    wrong = build_program(tmp_path, *flags, header=relaxed)
    assert "data race" in run_program(wrong, "callers"), "the test sees a missing order"


def test_threads_that_the_system_refuses_are_left_out(program):
    """And the team asks for them only once."""
    lines = run_program(program, "refused").splitlines()
    assert lines == ["2 threads, 1 workers", "2 threads, 1 workers", "2 attempts"]


def test_the_number_of_threads_may_change(program):
    lines = run_program(program, "fewer").splitlines()
    assert lines == ["4 threads, 3 workers", "2 threads, 3 workers", "1 by the caller"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count interruptions of a thread")
def test_two_interruptions_in_a_short_time_shorten_the_wait(program):
    """In microseconds: after each of four interruptions, and when the second has been forgotten."""
    assert run_program(program, "interruptions").split() == ["300", "20", "20", "300", "300"]


@pytest.mark.slow
@pytest.mark.usefixtures("needs_a_compiler")
def test_a_process_has_one_team_and_a_forked_process_has_its_own():
    """All libraries share the team: two workers in all."""
    code = """
import os, torch
torch.set_num_threads(3)
from nanovllm_extras.kernels.cpu.library import load_library
x, ids = torch.arange(64.0).view(8, 8), torch.zeros(8, dtype=torch.int64)
def compute():
    ids.zero_()
    for dtype in (torch.float32, torch.bfloat16):
        load_library(dtype).argmax(x.data_ptr(), ids.data_ptr(), 8, 8)
    return ids.tolist() == [7] * 8, len(os.listdir("/proc/self/task"))
assert compute()[0]
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0 and compute()[0]
    print("both")
else:
    os._exit(compute() != (True, 3))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "both\n", run.stderr


def test_no_worker_is_bound_by_default():
    if any(name in os.environ for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")):
        pytest.skip("the user binds threads")
    assert bound_cpus() == (None, 0)
