// The matrix product: a few rows of x times a few panels. Projections, q k^T and p v all use it. cpu.c describes the
// layout.
//
// There are four versions: on vectors of 16 floats, for AVX-512 and for any other processor; on the vectors of ARM
// (neon.h) and AVX2 (avx2.h), because GCC keeps wider ones on the stack; and on AMX's tiles, which multiply ten times as
// many numbers per cycle. One of them is compiled. `ROWS`, `FEW_ROWS` and `WIDTH` define how many rows and panels it
// multiplies at a time.

#pragma once
#include "vectors.h"
#if defined BFLOAT16 && (defined AMX || defined AMX_EMULATED)
#define HAS_TILES
#include "tiles.h"
#endif

// The accumulators must fit in the registers. Products of few rows wait for memory, so they multiply more panels at a
// time: more outstanding loads use more bandwidth.
#ifdef HAS_TILES
#define ROWS 32
#define FEW_ROWS 16
#define PANELS 4
#elif defined __AVX512F__
#define ROWS 12
#define FEW_ROWS 3
#define PANELS 8
#elif defined __aarch64__
#define ROWS 4
#define FEW_ROWS 2
#define PANELS 2
#elif defined IN_HALVES
#define ROWS 6
#define FEW_ROWS 3
#define PANELS 2
#else
#define ROWS 3
#define FEW_ROWS 3
#define PANELS 2
#endif
// Prefetching. AHEAD: the distance from a panel's lanes to those prefetched (2048: a part of 128 words). ASKS_AGAIN: every
// tile of rows prefetches all words again; if not, each tile prefetches a SHARE of them, in whole tiles of words.
#ifdef HAS_TILES
#define AHEAD(num_rows) ((num_rows) <= ROWS ? 256 : 2048)
#define ASKS_AGAIN false
#define SHARE(num_words, num_tiles) (((num_words) + (num_tiles) * TILE_WORDS - 1) / ((num_tiles) * TILE_WORDS) * TILE_WORDS)
#else
#define AHEAD(num_rows) ((num_rows) <= FEW_ROWS && PANELS >= 4 ? 256 : 1024)
#define ASKS_AGAIN true
#define SHARE(num_words, num_tiles) ((void)(num_tiles), num_words)
#endif
#define WIDTH(num_rows) ((num_rows) <= FEW_ROWS ? PANELS : 2)

// Computes out[row][16 * i + lane] = sum of x[row]'s words times panel i's, for up to ROWS rows and WIDTH(rows) panels.
struct product {
    const factors *x;
    long x_stride;   // words from one row to the next
    long num_words;  // words to sum over
    const uint32_t *panels[PANELS];
    const uint32_t *next[PANELS];  // the panels that are read afterwards, and prefetched now; with tiles, NULL for none
    long ask_from, ask_to;         // with tiles: prefetch only these words; 0, 0 means all
    // Panels may be divided into blocks at any places in memory: part b is at panels[i] + blocks[b] * block_words, and
    // has words_per_block words. NULL means one block. (V of a sequence has the blocks of its block table.)
    const int32_t *blocks;
    long block_words, words_per_block;
    // The processor's own prefetcher cannot follow a block table, so the product prefetches the block `far` places
    // ahead. After the last block, it prefetches the first blocks of `next`.
    long far;
    bool is_odd;  // the last word has only one bfloat16; the other half may be NaN, and 0 * NaN is NaN
    bool adds;    // add to the contents of `out`, for a long sum in several parts
    float *out;   // rows are `out_stride` apart; address and stride are aligned to vectors
    long out_stride;
};

// Return the address of block `block` of panel i, and (panel_after) the address to prefetch meanwhile.
static inline const uint32_t *panel_block(const struct product *p, int i, long block) {
    return p->panels[i] + (p->blocks ? p->blocks[block] * p->block_words : 0);
}

static inline const uint32_t *panel_after(const struct product *p, int i, long block, long num_blocks) {
    if (!p->blocks) return p->next[i];
    const long ahead = block + p->far;
    return ahead < num_blocks ? panel_block(p, i, ahead) : p->next[i] + p->blocks[ahead - num_blocks] * p->block_words;
}

static inline long words_per_block(const struct product *p) { return p->blocks ? p->words_per_block : p->num_words; }

static inline long count_blocks(const struct product *p) {
    return p->blocks ? (p->num_words + p->words_per_block - 1) / p->words_per_block : 1;
}

#ifdef HAS_TILES

// Multiply one tile of words of the rows by those of the panels, and add the products. One row of tiles is multiplied
// by up to four panels, two rows by up to two.
static inline __attribute__((always_inline)) void multiply_words(
    const uint32_t *x, long x_stride, const uint32_t *const *panels, const bool has_lower, const int num_panels) {
    tile_load(X_UPPER, x, x_stride * 4);
    tile_load(PANEL_EVEN, panels[0], 64);
    tile_multiply(SUMS_0, X_UPPER, PANEL_EVEN);
    if (num_panels > 1) {
        tile_load(PANEL_ODD, panels[1], 64);
        tile_multiply(SUMS_1, X_UPPER, PANEL_ODD);
    }
    if (has_lower) {
        tile_load(X_LOWER, x + TILE_ROWS * x_stride, x_stride * 4);
        tile_multiply(SUMS_2, X_LOWER, PANEL_EVEN);
        if (num_panels > 1) tile_multiply(SUMS_3, X_LOWER, PANEL_ODD);
    } else {
        if (num_panels > 2) {
            tile_load(PANEL_EVEN, panels[2], 64);
            tile_multiply(SUMS_2, X_UPPER, PANEL_EVEN);
        }
        if (num_panels > 3) {
            tile_load(PANEL_ODD, panels[3], 64);
            tile_multiply(SUMS_3, X_UPPER, PANEL_ODD);
        }
    }
}

// Multiply the last words, which are fewer than a tile's. They are copied and padded with zeros, because the memory
// after them may contain NaN or may not belong to the process.
static inline __attribute__((always_inline)) void multiply_last_words(
    const struct product *p, const uint32_t *x, const uint32_t *const *panels, long count, int num_rows,
    const bool has_lower, const int num_panels) {
    uint32_t last_x[ROWS][TILE_WORDS] = {0}, last[PANELS][TILE_WORDS][LANES] = {0};
    const uint32_t *copies[PANELS];
    for (int row = 0; row < num_rows; row++) memcpy(last_x[row], x + row * p->x_stride, count * sizeof **last_x);
    for (int i = 0; i < num_panels; i++) {
        memcpy(last[i], panels[i], count * sizeof *last[i]);
        for (int lane = 0; p->is_odd && lane < LANES; lane++) last[i][count - 1][lane] &= 0xffff;
        copies[i] = last[i][0];
    }
    FINISH_WRITES();
    multiply_words(last_x[0], TILE_WORDS, copies, has_lower, num_panels);
}

// Multiply with counts that the compiler knows, so that it generates no instructions for unused tiles.
static inline __attribute__((always_inline)) void multiply_tiles(
    const struct product *p, const int num_rows, const bool has_lower, const int num_panels) {
#define AT(i) (p->out + (has_lower ? (i) / 2 * TILE_ROWS * p->out_stride + (i) % 2 * LANES : (i) * LANES))
#define EACH_SUM(DO) if (num_panels > 0) { DO(0); } if (num_panels > 1) { DO(1); } \
    if (num_panels > 2 || has_lower) { DO(2); } if (num_panels > 3 || (has_lower && num_panels > 1)) { DO(3); }
#define START(i) if (p->adds) { tile_load(i, AT(i), p->out_stride * 4); } else { tile_zero(i); }
#define STORE(i) tile_store(i, AT(i), p->out_stride * 4)
    const bool asks = p->next[0];
    const long ask_to = p->ask_to ? p->ask_to : LONG_MAX;
    const long per_block = words_per_block(p), num_blocks = asks ? count_blocks(p) : 0;
    const int tile_words = p->blocks && per_block % TILE_WORDS ? TILE_WORDS / 2 : TILE_WORDS;
    shape_tiles(num_rows, tile_words);
    FINISH_WRITES();
    EACH_SUM(START)
    const uint32_t *x = p->x;
    for (long start = 0, block = 0; start < p->num_words; start += per_block, block++) {
        const uint32_t *panels[PANELS], *next[PANELS];
        for (int i = 0; i < num_panels; i++) {
            panels[i] = panel_block(p, i, block);
            next[i] = asks ? panel_after(p, i, block, num_blocks) : NULL;
        }
        const long left = p->num_words - start, end = left < per_block ? left : per_block;
        for (long k = 0; k < end; k += tile_words) {
            if (end - k < tile_words || (p->is_odd && start + k + tile_words == p->num_words))
                multiply_last_words(p, x, panels, end - k, num_rows, has_lower, num_panels);
            else
                multiply_words(x, p->x_stride, panels, has_lower, num_panels);
            x += end - k < tile_words ? end - k : tile_words;
            for (int i = 0; i < num_panels; i++) {
                for (int word = 0; asks && k >= p->ask_from && k < ask_to && word < tile_words; word++)
                    __builtin_prefetch(next[i] + (k + word) * LANES, 0, 2);
                panels[i] += tile_words * LANES;
            }
        }
    }
    EACH_SUM(STORE)
}

static void multiply(const struct product *p, int num_rows, int num_panels) {
    switch (num_rows > TILE_ROWS ? 4 + num_panels : num_panels) {
        case 1: multiply_tiles(p, num_rows, false, 1); break;
        case 2: multiply_tiles(p, num_rows, false, 2); break;
        case 3: multiply_tiles(p, num_rows, false, 3); break;
        case 4: multiply_tiles(p, num_rows, false, 4); break;
        case 5: multiply_tiles(p, num_rows, true, 1); break;
        case 6: multiply_tiles(p, num_rows, true, 2); break;
    }
}

// Return how many rows to multiply at a time. A full tile takes as long as one row, so tiles are filled.
static inline long rows_at_a_time(long num_rows) { return num_rows < ROWS ? num_rows : ROWS; }

#else

static inline void release_tiles(void) {}

// Return how many rows to multiply at a time: equal parts, for example 11 + 11 + 10 of 32 rows.
static inline long rows_at_a_time(long num_rows) {
    const long num_parts = (num_rows + ROWS - 1) / ROWS;
    return (num_rows + num_parts - 1) / (num_parts + !num_rows);
}

#if defined __aarch64__ || defined IN_HALVES
#ifdef __aarch64__
#include "neon.h"
#else
#include "avx2.h"
#endif

// Many rows need the registers for their sums, so they are multiplied by one panel at a time.
static inline __attribute__((always_inline)) void multiply_vectors(
    const struct product *p, const int num_rows, const int num_panels) {
    if (num_rows <= FEW_ROWS) {
        multiply_panels(p, num_rows, 0, num_panels);
    } else {
        for (int i = 0; i < num_panels; i++) multiply_panels(p, num_rows, i, 1);
    }
}

#else

static inline __attribute__((always_inline)) void multiply_vectors(
    const struct product *p, const int num_rows, const int num_panels) {
    floats sums[ROWS][PANELS];
    for (int i = 0; i < num_panels; i++) {
        for (int row = 0; row < num_rows; row++)
            sums[row][i] = p->adds ? *(const floats *)(p->out + row * p->out_stride + i * LANES) : (floats){0};
    }
    const factors *x = p->x;
    const long per_block = words_per_block(p), num_blocks = count_blocks(p);
    for (long start = 0, block = 0; start < p->num_words; start += per_block, block++) {
        const uint32_t *panels[PANELS], *next[PANELS];
        for (int i = 0; i < num_panels; i++) {
            panels[i] = panel_block(p, i, block);
            next[i] = panel_after(p, i, block, num_blocks);
        }
        const long left = p->num_words - start, end = left < per_block ? left : per_block;
        for (long k = 0; k < end; k++) {
            words columns[PANELS];
            for (int i = 0; i < num_panels; i++) {
                columns[i] = *(const words *)(panels[i] + k * LANES);
                __builtin_prefetch(next[i] + k * LANES, 0, 2);
            }
            if (p->is_odd && start + k == p->num_words - 1)
                for (int i = 0; i < num_panels; i++) columns[i] &= 0xffff;
            for (int row = 0; row < num_rows; row++) {
                const factors of_row = x[row * p->x_stride + k];
                for (int i = 0; i < num_panels; i++) sums[row][i] = multiply_add(sums[row][i], columns[i], of_row);
            }
        }
        x += end;
    }
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < num_panels; i++) *(floats *)(p->out + row * p->out_stride + i * LANES) = sums[row][i];
}

#endif

// Multiply with counts that the compiler knows, so that all sums stay in registers.
static void multiply(const struct product *p, int num_rows, int num_panels) {
#define CASE(rows, panels) \
    case (rows) * 16 + (panels): multiply_vectors(p, rows, panels); break;
#define MANY(rows) CASE(rows, 1) CASE(rows, 2)
#define FEW(rows) CASE(rows, 3) CASE(rows, 4) CASE(rows, 5) CASE(rows, 6) CASE(rows, 7) CASE(rows, 8)
    switch (num_rows * 16 + num_panels) {
        MANY(1) MANY(2) MANY(3)
#if ROWS >= 4
        MANY(4)
#endif
#if ROWS >= 6
        MANY(5) MANY(6)
#endif
#if ROWS > 6
        FEW(1) FEW(2) FEW(3) MANY(7) MANY(8) MANY(9) MANY(10) MANY(11) MANY(12)
#endif
    }
}
#endif
