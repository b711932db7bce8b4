// Decide which rows attend together: a tile of rows of one sequence, or of several sequences that begin with the same
// blocks.

#pragma once
#include "team.h"
#include "vectors.h"

// The sequences of a step, in the form of nanovllm/batch.py.
struct batch {
    const int32_t *block_tables, *seq_lens, *cu_seqlens_q;
    long num_seqs, max_num_blocks;
};

static inline long count_new(const struct batch *b, long seq) { return b->cu_seqlens_q[seq + 1] - b->cu_seqlens_q[seq]; }

static inline const int32_t *block_table(const struct batch *b, long seq) {
    return b->block_tables + seq * b->max_num_blocks;
}

// Maximum number of rows of several sequences that read their shared blocks together, while these are in the L1 cache.
#define SHARING_ROWS (2 * ROWS)

// A piece of work for one K and V head: up to ROWS rows of sequence `seq`, starting at row `first_row`, or all rows of
// `num_seqs` sequences whose first `num_shared` blocks are the same.
struct work {
    int32_t seq, kv_head, first_row, num_seqs, num_shared;
};

// Count the leading blocks that two sequences share, among the blocks that were full before this step.
static long count_shared(const struct batch *b, long seq, long other, long block_size) {
    const int32_t *x = block_table(b, seq), *y = block_table(b, other);
    const long x_len = b->seq_lens[seq] - count_new(b, seq), y_len = b->seq_lens[other] - count_new(b, other);
    const long most = (x_len < y_len ? x_len : y_len) / block_size;
    long count = 0;
    while (count < most && x[count] == y[count]) count++;
    return count;
}

// Find the sequences after `seq` that share at least as many leading blocks with it as the first of them does. Take at
// most `most` sequences and SHARING_ROWS rows in all.
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

// Divide all rows of the batch, `group` for each new token and K and V head, into pieces of work. The heads of the same
// rows are consecutive. Return the number of pieces, which is at most one for each ROWS rows of a sequence and head.
static long divide(const struct batch *b, struct work *work, long num_kv_heads, long group, long block_size,
                   bool may_share) {
    // a limit that leaves enough pieces of work for all threads
    const long most = may_share ? b->num_seqs * num_kv_heads / (2 * count_threads()) : 1;
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
