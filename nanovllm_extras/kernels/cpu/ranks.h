// Collectives of the ranks of one engine on one machine. The ranks are processes, and exchange tensors through shared
// memory.
//
// Each rank has a post and two buffers in this memory. Tensors are exchanged in chunks of at most `buffer_bytes`, one
// round for each chunk, in which every rank
//
//     1. copies its chunk to its buffer round % 2
//     2. arrives: writes `round` to its post
//     3. waits until all others have arrived in this round
//     4. reads the buffers of the others.
//
// Two buffers suffice: a rank overwrites the buffer of round i in round i + 2, after all ranks have arrived in round
// i + 1. Each rank finishes reading round i before it arrives in round i + 1.
//
// The only atomics are in `arrive` and `wait_for`. A rank that sees another rank arrive (acquire) also sees everything
// that this rank wrote before it arrived (release).

#pragma once
#include <sched.h>
#include "team.h"
#include "vectors.h"
#ifdef __linux__
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FUTEX_WAIT 0  // of <linux/futex.h>
#define FUTEX_WAKE 1
#define PIDFD_OPEN 434  // of <asm/unistd.h>, the same on all processors
#endif

struct post {
    _Alignas(128) uint32_t round;  // the last round in which this rank has arrived; a futex
    uint32_t num_sleepers;         // number of ranks that wait for this rank in the kernel
    int32_t pid;                   // process id of this rank; 0 before it has started
    uint32_t is_aborted;           // used only in the post of rank 0
};

// The state of one rank. Only the first two members point to shared memory.
struct ranks {
    struct post *posts;   // [size]
    char *buffers;        // [size][2][buffer_bytes]
    long rank, size, buffer_bytes, spin_ns;
    uint32_t round;       // may overflow: rounds are compared by their difference
};

// ---- waiting

#define LOOK_AGAIN_NS 100000000  // how often a sleeping rank checks whether its peer is alive

static inline bool has_arrived(const struct post *post, uint32_t round) {
    return (int32_t)(__atomic_load_n(&post->round, __ATOMIC_ACQUIRE) - round) >= 0;
}

static inline bool is_aborted(const struct ranks *r) { return __atomic_load_n(&r->posts->is_aborted, __ATOMIC_ACQUIRE); }

#ifdef __linux__
static inline void wake(struct post *post) { syscall(SYS_futex, &post->round, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

// Sleep until `round` differs from `seen`, or for LOOK_AGAIN_NS. Return whether the time is over.
static inline bool sleep_on(struct post *post, uint32_t seen) {
    const struct timespec timeout = {.tv_nsec = LOOK_AGAIN_NS};
    return syscall(SYS_futex, &post->round, FUTEX_WAIT, seen, &timeout, NULL, 0) && errno == ETIMEDOUT;
}

// Return whether the process has ended. Zombies count as ended; `kill` would still find them.
static bool has_ended(int32_t pid) {
    if (!pid) return false;
    const int fd = syscall(PIDFD_OPEN, pid, 0);
    if (fd < 0) return errno == ESRCH || (kill(pid, 0) && errno == ESRCH);
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    const bool result = poll(&ended, 1, 0) > 0;
    close(fd);
    return result;
}
#else  // these let cpu.c compile; the ranks use Gloo (nanovllm_extras/parallel/meeting.py)
static inline void wake(struct post *post) { (void)post; }
static inline bool sleep_on(struct post *post, uint32_t seen) { return (void)post, (void)seen, true; }
static bool has_ended(int32_t pid) { return (void)pid, true; }
#endif

// Make current and later calls of all ranks fail.
void abort_ranks(struct ranks *r) {
    __atomic_store_n(&r->posts->is_aborted, 1, __ATOMIC_SEQ_CST);
    for (long rank = 0; rank < r->size; rank++) wake(&r->posts[rank]);
}

// Return whether a peer has ended without arriving in this round.
static bool has_lost_one(const struct ranks *r) {
    for (long rank = 0; rank < r->size; rank++)
        if (rank != r->rank && has_ended(r->posts[rank].pid) && !has_arrived(&r->posts[rank], r->round)) return true;
    return false;
}

static inline void arrive(struct ranks *r) {
    struct post *own = &r->posts[r->rank];
    // Sequentially consistent, like both accesses of a sleeper: either this rank sees the sleeper, or the sleeper sees
    // this round.
    __atomic_store_n(&own->round, r->round, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own->num_sleepers, __ATOMIC_SEQ_CST)) wake(own);
}

static void sleep_until_arrived(struct ranks *r, struct post *peer) {
    __atomic_add_fetch(&peer->num_sleepers, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        const uint32_t seen = __atomic_load_n(&peer->round, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - r->round) >= 0 || is_aborted(r)) break;
        if (sleep_on(peer, seen) && has_lost_one(r)) abort_ranks(r);
    }
    __atomic_sub_fetch(&peer->num_sleepers, 1, __ATOMIC_SEQ_CST);
}

// Wait until the peer has arrived. Return false if the ranks are aborted.
static bool wait_for(struct ranks *r, struct post *peer) {
    if (has_arrived(peer, r->round)) return true;
    const long end = r->spin_ns ? now_ns() + r->spin_ns : 0;
    while (r->spin_ns && now_ns() < end) {
        for (int i = 0; i < 16; i++) {
            if (has_arrived(peer, r->round)) return true;
            pause_briefly();
        }
        sched_yield();  // the peer may be waiting for this core
    }
    sleep_until_arrived(r, peer);
    return has_arrived(peer, r->round);
}

// ---- one round

// Return the buffer of a rank for this round.
static inline char *buffer(const struct ranks *r, long rank) {
    return r->buffers + (rank * 2 + r->round % 2) * r->buffer_bytes;
}

struct copy {
    char *to;
    const char *from;
};

static void copy_bytes(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct copy *c = arguments;
    memcpy(c->to + first, c->from + first, last - first);
}

static void copy(char *to, const char *from, long num_bytes) {
    parallel_for(copy_bytes, &(struct copy){to, from}, num_bytes, 1 << 15, LONG_MAX);
}

// Do steps 1 to 3. x: num_bytes, or NULL if the other ranks need no data of this rank. Return whether all have arrived.
static bool exchange(struct ranks *r, const void *x, long num_bytes) {
    if (is_aborted(r)) return false;
    r->round++;
    if (x) copy(buffer(r, r->rank), x, num_bytes);
    arrive(r);
    for (long rank = 0; rank < r->size; rank++)
        if (rank != r->rank && !wait_for(r, &r->posts[rank])) return false;
    return true;
}

struct shares {
    const struct ranks *ranks;
    element *x;
    long count;
};

static void add_vectors(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct shares *s = arguments;
    for (long i = first * LANES; i < last * LANES; i += LANES) {
        floats sum = load((const element *)buffer(s->ranks, 0) + i);
        for (long rank = 1; rank < s->ranks->size; rank++) sum += load((const element *)buffer(s->ranks, rank) + i);
        store_some(s->x + i, sum, s->count - i < LANES ? s->count - i : LANES);
    }
}

// Set x: [count] to the sum of all buffers: added in float32, in the order of ranks, and rounded once.
static void add_buffers(const struct ranks *r, element *x, long count) {
    parallel_for(add_vectors, &(struct shares){r, x, count}, (count + LANES - 1) / LANES, items_of(LANES), LONG_MAX);
}

// ---- collectives: all ranks make the same calls in the same order with the same sizes. They return 0, or 1 if aborted

// Replace x: [count] by its sum over all ranks, in place.
int all_reduce(struct ranks *r, element *x, long count) {
    const long most = r->buffer_bytes / sizeof(element);
    for (long start = 0; start < count; start += most) {
        const long part = count - start < most ? count - start : most;
        if (!exchange(r, x + start, part * sizeof(element))) return 1;
        add_buffers(r, x + start, part);
    }
    return 0;
}

// Replace x: [num_bytes] by its contents on rank 0, in place.
int broadcast(struct ranks *r, char *x, long num_bytes) {
    for (long start = 0; start < num_bytes; start += r->buffer_bytes) {
        const long part = num_bytes - start < r->buffer_bytes ? num_bytes - start : r->buffer_bytes;
        if (!exchange(r, r->rank ? NULL : x + start, part)) return 1;
        if (r->rank) copy(x + start, buffer(r, 0), part);
    }
    return 0;
}

// Gather x: [num_rows, row_bytes] of all ranks -> y: [num_rows, size, row_bytes]. y is NULL on ranks that need no
// result.
int gather(struct ranks *r, const char *x, char *y, long num_rows, long row_bytes) {
    const long num_bytes = num_rows * row_bytes;
    for (long start = 0; start < num_bytes; start += r->buffer_bytes) {
        const long end = num_bytes - start < r->buffer_bytes ? num_bytes : start + r->buffer_bytes;
        if (!exchange(r, x + start, end - start)) return 1;
        for (long rank = 0; y && rank < r->size; rank++)
            for (long from = start, to; from < end; from = to) {  // a row, or the part of it in this chunk
                const long row = from / row_bytes, column = from % row_bytes;
                to = (row + 1) * row_bytes < end ? (row + 1) * row_bytes : end;
                copy(y + (row * r->size + rank) * row_bytes + column, buffer(r, rank) + from - start, to - from);
            }
    }
    return 0;
}
