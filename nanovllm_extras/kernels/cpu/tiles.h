// AMX, Intel's matrix tiles, or the same in plain C. A tile is a register of up to 16 rows of 64 bytes. A processor has
// eight tiles.
//
// A multiplication is one instruction on three tiles: sums [m][16], a [m][k words], b [k words][16]. A word is two
// bfloat16 (`tdpbf16ps`) or four bytes (`tdpbsud`). The layout is that of all kernels (cpu.c, quantised.c): b is k
// words of a panel, a is m rows of x.
//
// -DAMX          uses the instructions. Linux must have allowed the process to use them (library.py requests this).
// -DAMX_EMULATED uses plain C with the same results bit for bit, so that tests can run on any processor.

#pragma once
#include "vectors.h"

#define TILE_ROWS 16
#define TILE_WORDS 16  // words in a row of a tile

// Four tiles of sums, two of x (rows 0 … 15 and 16 … 31), two of panels. Instructions need literal numbers.
#define NUM_TILES 8
#define SUMS_0 0
#define SUMS_1 1
#define SUMS_2 2
#define SUMS_3 3
#define X_UPPER 4
#define X_LOWER 5
#define PANEL_EVEN 6
#define PANEL_ODD 7

// The operand of `ldtilecfg`: palette 1 is the only one; each tile has a number of bytes in a row and a number of rows.
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#ifdef AMX
#if !defined __AMX_BF16__ || !defined __AMX_INT8__
#error "this compiler does not know AMX"
#endif
// GCC 12 does not know that `ldtilecfg` and `tileloadd` read memory, so it could move earlier writes after them.
#define FINISH_WRITES() __asm__ volatile("" ::: "memory")
static inline void tile_configure(const struct tile_config *config) {
    FINISH_WRITES();
    _tile_loadconfig(config);
}
static inline void tile_release(void) { _tile_release(); }
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) _tile_loadd(tile, from, stride)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_multiply(sums, a, b) _tile_dpbf16ps(sums, a, b)
#define tile_multiply_bytes(sums, a, b) _tile_dpbsud(sums, a, b)

#else
#define FINISH_WRITES()
typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef int64_t longs __attribute__((vector_size(8 * LANES)));

static _Thread_local struct tile_config tile_shapes;
static _Thread_local words tiles[NUM_TILES][TILE_ROWS];

static inline void tile_zero(int tile) { memset(tiles[tile], 0, sizeof tiles[tile]); }

static inline void tile_configure(const struct tile_config *config) {
    tile_shapes = *config;
    for (int tile = 0; tile < NUM_TILES; tile++) tile_zero(tile);
}

static inline void tile_release(void) { tile_configure(&(struct tile_config){0}); }

// Load a tile. `stride`: bytes from one row in memory to the next
static inline void tile_load(int tile, const void *from, long stride) {
    tile_zero(tile);
    for (int row = 0; row < tile_shapes.rows[tile]; row++)
        memcpy(&tiles[tile][row], (const char *)from + row * stride, tile_shapes.row_bytes[tile]);
}

static inline void tile_store(int tile, void *to, long stride) {
    for (int row = 0; row < tile_shapes.rows[tile]; row++)
        memcpy((char *)to + row * stride, &tiles[tile][row], tile_shapes.row_bytes[tile]);
}

// Convert to float32. Numbers that are too small for a normal float32 become 0.
static inline floats flush(doubles x) {
    const double least = 0x1p-126 * (1 - 0x1p-25);  // rounded to 24 bits, this is the smallest normal number
    const ints is_tiny = __builtin_convertvector((longs)((x < least) & (x > -least)), ints);
    return (floats)((ints)__builtin_convertvector(x, floats) & (~is_tiny | INT32_MIN));  // keeps the sign
}

static inline doubles widen(floats x) { return __builtin_convertvector(x, doubles); }
static inline doubles read_tile(words x) { return widen(flush(widen((floats)x))); }  // denormals count as 0

// Multiply as Intel's manual defines TDPBF16PS. The products of the even elements of a row of a with those of b are
// added one by one, starting at 0, and so are the products of the odd elements. Then both are added, and then the sum
// is added to `sums`. Every step rounds to the nearest float32, and treats denormal inputs and results as 0. (A double
// represents a product of two bfloat16, and the bits of its sum with a float32 that affect the rounding.)
static inline void tile_multiply(int sums, int a, int b) {
    const int num_words = tile_shapes.row_bytes[a] / 4;
    if (tile_shapes.rows[sums] != tile_shapes.rows[a] || tile_shapes.rows[b] != num_words) abort();  // hardware: #UD
    for (int row = 0; row < tile_shapes.rows[sums]; row++) {
        floats even = {0}, odd = {0};
        for (int k = 0; k < num_words; k++) {
            const words x = (words){0} + tiles[a][row][k], panel = tiles[b][k];
            even = flush(read_tile(x << 16) * read_tile(panel << 16) + widen(even));
            odd = flush(read_tile(x & 0xffff0000) * read_tile(panel & 0xffff0000) + widen(odd));
        }
        const floats both = flush(widen(even) + widen(odd));
        tiles[sums][row] = (words)flush(read_tile(tiles[sums][row]) + widen(both));
    }
}

// Multiply as TDPBSUD does: add the products of a's signed bytes and b's unsigned bytes to the sums of 32 bits.
static inline void tile_multiply_bytes(int sums, int a, int b) {
    const int num_words = tile_shapes.row_bytes[a] / 4;
    if (tile_shapes.rows[sums] != tile_shapes.rows[a] || tile_shapes.rows[b] != num_words) abort();  // hardware: #UD
    for (int row = 0; row < tile_shapes.rows[sums]; row++)
        for (int k = 0; k < num_words; k++)
            for (int shift = 0; shift < 32; shift += 8)
                tiles[sums][row] += (tiles[b][k] >> shift & 0xff) * (uint32_t)(int8_t)(tiles[a][row][k] >> shift);
}
#endif

// The current shape of the tiles. Setting it takes as long as a dozen multiplications, so it is kept between products.
static _Thread_local int tiles_are_for;

static inline void shape_tiles(int num_rows, int num_words) {
    if (tiles_are_for == num_rows * 32 + num_words) return;
    tiles_are_for = num_rows * 32 + num_words;
    const bool has_lower = num_rows > TILE_ROWS;
    const int upper = has_lower ? TILE_ROWS : num_rows, lower = has_lower ? num_rows - TILE_ROWS : num_rows;
    struct tile_config config = {.palette = 1};
    for (int tile = 0; tile < NUM_TILES; tile++) {
        const bool is_lower = tile == X_LOWER || (has_lower && (tile == SUMS_2 || tile == SUMS_3));
        config.rows[tile] = tile >= PANEL_EVEN ? num_words : is_lower ? lower : upper;
        config.row_bytes[tile] = tile == X_UPPER || tile == X_LOWER ? num_words * 4 : 64;
    }
    tile_configure(&config);
}

// Release the tiles, so that other code of the process finds them unused.
static inline void release_tiles(void) {
    tile_release();
    tiles_are_for = 0;
}
