// Which rows attend together: a tile of rows of one sequence, or of several that read the same blocks first.

#pragma once
#include <omp.h>
#include "vectors.h"

// The sequences of a step, as batch.py describes them.
struct batch {
    const int32_t *block_tables, *seq_lens, *cu_seqlens_q;
    long num_seqs, max_num_blocks;
};

static inline long count_new(const struct batch *b, long seq) { return b->cu_seqlens_q[seq + 1] - b->cu_seqlens_q[seq]; }

static inline const int32_t *block_table(const struct batch *b, long seq) {
    return b->block_tables + seq * b->max_num_blocks;
}

// So many rows of several sequences read what they share while it is in the L1 cache.
#define SHARING_ROWS (2 * ROWS)

// For one K and V head: up to ROWS rows of sequence `seq`, from row `first_row` on, or all rows of `num_seqs` sequences,
// whose first `num_shared` blocks are the same.
struct work {
    int32_t seq, kv_head, first_row, num_seqs, num_shared;
};

// How many blocks two sequences both begin with, of those that were full before this step.
static long count_shared(const struct batch *b, long seq, long other, long block_size) {
    const int32_t *x = block_table(b, seq), *y = block_table(b, other);
    const long x_len = b->seq_lens[seq] - count_new(b, seq), y_len = b->seq_lens[other] - count_new(b, other);
    const long most = (x_len < y_len ? x_len : y_len) / block_size;
    long count = 0;
    while (count < most && x[count] == y[count]) count++;
    return count;
}

// The rows of `seq` and of the sequences behind it that share as many blocks with it as the first of them does: `most`
// sequences, SHARING_ROWS rows.
static struct work find_sharers(const struct batch *b, long seq, long most, long group, long block_size) {
    struct work w = {.seq = seq, .num_seqs = 1};
    long num_rows = count_new(b, seq) * group;
    for (long other = seq + 1; other < b->num_seqs && w.num_seqs < most; other++) {
        num_rows += count_new(b, other) * group;
        if (num_rows > SHARING_ROWS) break;
        const long count = count_shared(b, seq, other, block_size);
        if (count == 0 || count < w.num_shared) break;
        if (w.num_seqs++ == 1) w.num_shared = count;
    }
    return w;
}

// All rows of the batch, `group` for each new token and K and V head; the heads of the same rows one after another.
// -> work: [at most one for each ROWS rows of a sequence and head], how much there is
static long divide(const struct batch *b, struct work *work, long num_kv_heads, long group, long block_size,
                   bool may_share) {
    // so few together that there is enough for all threads
    const long most = may_share ? b->num_seqs * num_kv_heads / (2 * omp_get_max_threads()) : 1;
    long count = 0;
    for (long seq = 0; seq < b->num_seqs;) {
        struct work w = find_sharers(b, seq, most, group, block_size);
        const long num_rows = w.num_seqs > 1 ? 1 : count_new(b, seq) * group;
        for (w.kv_head = 0; w.kv_head < num_kv_heads; w.kv_head++)
            for (w.first_row = 0; w.first_row < num_rows; w.first_row += ROWS) work[count++] = w;
        seq += w.num_seqs;
    }
    return count;
}
