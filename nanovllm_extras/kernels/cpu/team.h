// The threads that share the loops of the kernels.
//
// `parallel_for` divides a loop among the calling thread and the workers of a team. Each thread takes the next items
// that no thread has taken, until none is left. The caller then closes the loop, and waits only for workers that are
// inside. A worker that another process keeps from running finds the loop closed, and the other threads have done its
// share. The results have the same bits with any division, because each item's result depends only on the item.
//
// A waiting thread spins first, because waking a sleeping one takes some 50 µs. But a thread that spins occupies a core.
// If another process runs on a core, the thread that is waited for may be in the queue behind it, and Linux moves it
// only to a core that is idle. So if Linux has interrupted a thread of the team twice in a short time, all threads of
// the team sleep sooner.

#pragma once
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef RUSAGE_THREAD
#define RUSAGE_THREAD 1  // of <bits/resource.h>, which defines it only with _GNU_SOURCE
#endif
#endif

#define SPIN_NS 300000        // how long a thread spins before it sleeps
#define SPIN_BUSY_NS 20000    // the same after interruptions
#define LOOK_NS 1000000       // how often a thread counts its interruptions
#define TWICE_NS 20000000     // two interruptions within this time mean that other processes need the cores,
#define BUSY_NS 100000000     // and this is how long the team remembers it
#define STACK_BYTES (1 << 20)  // of a worker

// The body of a loop: computes the items `first` … `last - 1`. `thread` numbers the threads' buffers: 0 is the caller.
typedef void loop_body(const void *arguments, long first, long last, int thread);

// `door` is one number, so that a worker can check that the loop is open and enter in one atomic operation: the number
// of workers inside, IS_OPEN, and above it the number of the loop. The number of the loop may overflow: a worker that
// has missed some loops enters the next.
#define INSIDE 0xffffu
#define IS_OPEN 0x10000u
#define LOOP (~(INSIDE | IS_OPEN))
#define NEXT_LOOP 0x20000u

struct team {
    int (*count_threads)(void);  // returns how many threads the calling thread may use; NULL: one
    const void *cpus;            // the processors of workers, as sched_setaffinity takes them; NULL: the caller's
    long cpus_bytes;
    pthread_mutex_t turn;  // held during a loop: loops of several calling threads run one after another
    int num_workers;
    int num_numbered;  // workers that have got their number
    bool is_refused;   // the system has refused to create another worker
    bool knows_forks;
    // the loop, which changes only while no worker is inside
    loop_body *body;
    const void *arguments;
    long count, least, most;  // `least` to `most` of `count` items at a time
    int num_threads;
    _Alignas(128) long next;  // the first item that no thread has taken
    _Alignas(128) uint32_t door;
    _Alignas(128) long interrupted_at, busy_until;  // as now_ns
    // for threads that sleep
    pthread_mutex_t sleep;
    pthread_cond_t opened, left;
    int num_asleep;      // workers
    int caller_is_asleep;
};

// The libraries of a process share one team (`join_team`): a waiting worker of another team would occupy a core.
static struct team own_team = {
    .turn = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER,
    .opened = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};
static struct team *team = &own_team;

// ---- waiting

static inline void pause_briefly(void) {
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("isb");  // `yield` does nothing on most of them
#endif
}

static inline long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

// Return how often another thread got the core of this thread while this thread had work to do.
static long count_interruptions(void) {
#ifdef __linux__
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nivcsw;
#endif
    return 0;
}

// Note whether this thread has been interrupted since its last call.
static void look_around(struct team *t, long now) {
    static _Thread_local long last_look, last_count;
    if (now - last_look < LOOK_NS) return;
    const long count = count_interruptions();
    if (last_look && count > last_count) {
        const long before = __atomic_exchange_n(&t->interrupted_at, now, __ATOMIC_RELAXED);
        if (before && now - before < TWICE_NS) __atomic_store_n(&t->busy_until, now + BUSY_NS, __ATOMIC_RELAXED);
    }
    last_look = now, last_count = count;
}

static inline long spin_ns(const struct team *t, long now) {
    return now < __atomic_load_n(&t->busy_until, __ATOMIC_RELAXED) ? SPIN_BUSY_NS : SPIN_NS;
}

// What threads wait for: a worker for a loop that it has not entered yet, the caller for workers that are inside.
static inline bool may_enter(uint32_t door, uint32_t loop) { return (door & IS_OPEN) && (door & LOOP) != loop; }
static inline bool have_left(uint32_t door, uint32_t loop) { return (void)loop, !(door & INSIDE); }
typedef bool condition(uint32_t door, uint32_t loop);

// Spin until the condition is true. Return false if that takes too long.
static inline bool spin(struct team *t, condition *is_true, uint32_t loop) {
    const long start = now_ns();
    look_around(t, start);
    for (long now = start; now - start < spin_ns(t, now); now = now_ns())
        for (int i = 0; i < 16; i++) {
            if (is_true(__atomic_load_n(&t->door, __ATOMIC_ACQUIRE), loop)) return true;
            pause_briefly();
        }
    return false;
}

// Wait until the condition is true; `changed` is signalled when it may be.
//
// All accesses of `door` and `num_asleep` that decide about sleeping and waking are sequentially consistent: either the
// thread that waits sees the new door, or the thread that has changed the door sees that it waits.
static inline void wait_until(struct team *t, condition *is_true, uint32_t loop, pthread_cond_t *changed,
                              int *num_asleep) {
    if (spin(t, is_true, loop)) return;
    pthread_mutex_lock(&t->sleep);
    __atomic_add_fetch(num_asleep, 1, __ATOMIC_SEQ_CST);
    while (!is_true(__atomic_load_n(&t->door, __ATOMIC_SEQ_CST), loop)) pthread_cond_wait(changed, &t->sleep);
    __atomic_sub_fetch(num_asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&t->sleep);
}

static inline void wake_threads(struct team *t, pthread_cond_t *changed, const int *num_asleep) {
    if (!__atomic_load_n(num_asleep, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&t->sleep);
    pthread_cond_broadcast(changed);
    pthread_mutex_unlock(&t->sleep);
}

// ---- a loop

// Take large parts first, because a thread reads neighbouring items fastest. The last, small parts let all threads end
// together.
static void take_items(struct team *t, int thread) {
    long first = __atomic_load_n(&t->next, __ATOMIC_RELAXED), left;
    while ((left = t->count - first) > 0) {
        long size = left / (2 * t->num_threads);
        size = size > t->most ? t->most : size < t->least ? t->least : size;
        size = size < left ? size : left;
        // if another thread has taken items meanwhile, the exchange fails and reads `first` again
        if (__atomic_compare_exchange_n(&t->next, &first, first + size, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            t->body(t->arguments, first, first + size, thread);
            first = __atomic_load_n(&t->next, __ATOMIC_RELAXED);
        }
    }
}

// Enter the open loop, unless the caller has closed it meanwhile. Return the number of the loop, or `last`.
static uint32_t try_to_enter(struct team *t, uint32_t last) {
    uint32_t door = __atomic_load_n(&t->door, __ATOMIC_RELAXED);
    while (may_enter(door, last))  // if another thread has changed it, the exchange reads `door` again
        if (__atomic_compare_exchange_n(&t->door, &door, door + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return door & LOOP;
    return last;
}

static void *work(void *argument) {
    struct team *t = argument;
    const int thread = __atomic_add_fetch(&t->num_numbered, 1, __ATOMIC_RELAXED);
#ifdef __linux__
    if (t->cpus) syscall(SYS_sched_setaffinity, 0, t->cpus_bytes, t->cpus);
#endif
    for (uint32_t loop, last = 0;; last = loop) {
        wait_until(t, may_enter, last, &t->opened, &t->num_asleep);
        loop = try_to_enter(t, last);
        if (loop == last) continue;
        if (thread < t->num_threads) take_items(t, thread);
        __atomic_sub_fetch(&t->door, 1, __ATOMIC_SEQ_CST);
        wake_threads(t, &t->left, &t->caller_is_asleep);
    }
    return NULL;
}

// A forked process has none of the workers, and another thread may have held the locks.
static void forget_workers(void) {
    team->num_workers = team->num_numbered = team->num_asleep = team->caller_is_asleep = 0;
    team->door &= LOOP;
    team->turn = team->sleep = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    team->opened = team->left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

// Create workers until there are `count`, or as many as the system allows.
static void create_workers(struct team *t, int count) {
    if (t->num_workers >= count || t->is_refused) return;
    if (!t->knows_forks) t->knows_forks = pthread_atfork(NULL, NULL, forget_workers) == 0;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (t->num_workers < count && !t->is_refused) {
        pthread_t thread;
        t->is_refused = pthread_create(&thread, &attributes, work, t) != 0;
        t->num_workers += !t->is_refused;
    }
    pthread_attr_destroy(&attributes);
}

static _Thread_local int kept_threads;  // of the calling thread; 0 asks PyTorch at each loop

// Let the loops of the calling thread use `count` threads, whatever PyTorch's number is; 0 asks PyTorch again.
void keep_threads(int count) { kept_threads = count; }

// Return the most threads that a loop of the calling thread uses.
static inline int count_threads(void) {
    return kept_threads ? kept_threads : team->count_threads ? team->count_threads() : 1;
}

// Return how many items of `size` numbers are worth waking another thread.
static inline long items_of(long size) { return size < 1 << 13 ? (1 << 13) / size : 1; }

// Call body(arguments, first, last, thread) until all items 0 … count - 1 are computed: `least` to `most` items at a
// time, or all at once if one thread computes them. `thread` is less than count_threads().
static void parallel_for(loop_body *body, const void *arguments, long count, long least, long most) {
    struct team *t = team;
    const int num_threads = count_threads();
    if (num_threads < 2 || count <= least) {
        body(arguments, 0, count, 0);
        return;
    }
    pthread_mutex_lock(&t->turn);
    create_workers(t, num_threads - 1);
    t->body = body, t->arguments = arguments, t->count = count, t->num_threads = num_threads;
    t->least = least, t->most = most;
    __atomic_store_n(&t->next, 0, __ATOMIC_RELAXED);
    // no worker changes the closed door, but one may be trying to (`try_to_enter`), so this is an atomic read too
    const uint32_t door = __atomic_load_n(&t->door, __ATOMIC_RELAXED);
    __atomic_store_n(&t->door, ((door & LOOP) + NEXT_LOOP) | IS_OPEN, __ATOMIC_SEQ_CST);
    wake_threads(t, &t->opened, &t->num_asleep);
    take_items(t, 0);
    if (__atomic_and_fetch(&t->door, ~IS_OPEN, __ATOMIC_SEQ_CST) & INSIDE)
        wait_until(t, have_left, 0, &t->left, &t->caller_is_asleep);
    else
        look_around(t, now_ns());
    pthread_mutex_unlock(&t->turn);
}

// Join the team `other`, or offer this library's own if it is NULL. Return the team, which other libraries can join.
struct team *join_team(struct team *other, int (*count)(void), const void *cpus, long cpus_bytes) {
    if (other) return team = other;
    team->count_threads = count, team->cpus = cpus, team->cpus_bytes = cpus_bytes;
    return team;
}
