// The matrix product on ARM, with vectors of four floats. Instructions take a word of x by its lane, so that all sums
// stay in registers.
//
// product.h includes this file. A panel's 16 lanes are four vectors. Sums take at most 16 of the 32 registers: two rows
// of two panels, or four rows of one panel. The order of a row's sums does not depend on the number of rows.

#pragma once
#include <arm_neon.h>

#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

// `four_words` are four words of a row of x. `multiply_by` returns sum + column * the word in one of their lanes.
#ifdef WIDENS
typedef struct { float32x4_t low, high; } four_words;

static inline float32x4_t low_halves(uint32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }

static inline float32x4_t high_halves(uint32x4_t x) {
    return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000)));
}

static inline four_words load_words(const factors *x) {
    const float32x4x2_t both = vld2q_f32(&x->low);
    return (four_words){both.val[0], both.val[1]};
}

static inline four_words repeat_word(const factors *x) {
    const float32x2_t both = vld1_f32(&x->low);
    return (four_words){vdupq_lane_f32(both, 0), vdupq_lane_f32(both, 1)};
}

// Otherwise GCC loads each lane to its own register, and spills the sums.
#define KEEP(x) __asm__("" : "+w"((x).low), "+w"((x).high))

#define multiply_by(sum, column, x, lane) \
    vfmaq_laneq_f32(vfmaq_laneq_f32(sum, low_halves(column), (x).low, lane), high_halves(column), (x).high, lane)
#else
typedef uint32x4_t four_words;

static inline four_words load_words(const factors *x) { return vld1q_u32(x); }

static inline four_words repeat_word(const factors *x) { return vld1q_dup_u32(x); }

#define KEEP(x) __asm__("" : "+w"(x))  // as above

#ifdef BFLOAT16
#define multiply_by(sum, column, x, lane) \
    vbfdotq_laneq_f32(sum, vreinterpretq_bf16_u32(column), vreinterpretq_bf16_u32(x), lane)
#else
#define multiply_by(sum, column, x, lane) \
    vfmaq_laneq_f32(sum, vreinterpretq_f32_u32(column), vreinterpretq_f32_u32(x), lane)
#endif
#endif

// Multiply the next word of the panels by one lane of each row's x. `mask` clears the unused half of the last word.
#define MULTIPLY_WORD(word, lane, mask) \
    UNROLLED for (int i = 0; i < num_panels; i++) { \
        UNROLLED for (int part = 0; part < 4; part++) { \
            const uint32x4_t column = vld1q_u32(panels[i] + (word) * LANES + part * 4) mask; \
            UNROLLED for (int row = 0; row < num_rows; row++) \
                sums[row][i][part] = multiply_by(sums[row][i][part], column, x4[row], lane); \
        } \
        __builtin_prefetch(next[i] + (word) * LANES, 0, 2); \
    }

// Compute panels first … first + num_panels - 1 of the product.
static inline __attribute__((always_inline)) void multiply_panels(
    const struct product *p, const int num_rows, const int first, const int num_panels) {
    float32x4_t sums[ROWS][PANELS][4];
    four_words x4[ROWS];
    float *const out = p->out + first * LANES;
#define EACH_PART \
    UNROLLED for (int row = 0; row < num_rows; row++) UNROLLED for (int i = 0; i < num_panels; i++) \
        UNROLLED for (int part = 0; part < 4; part++)
#define AT (out + row * p->out_stride + i * LANES + part * 4)
    EACH_PART sums[row][i][part] = p->adds ? vld1q_f32(AT) : vdupq_n_f32(0);
    const long per_block = words_per_block(p), num_blocks = count_blocks(p), stride = p->x_stride;
    for (long start = 0, block = 0; start < p->num_words; start += per_block, block++) {
        const uint32_t *panels[PANELS], *next[PANELS];
        const factors *x = p->x + start;
        UNROLLED for (int i = 0; i < num_panels; i++) {
            panels[i] = panel_block(p, first + i, block);
            next[i] = panel_after(p, first + i, block, num_blocks);
        }
        const long left = p->num_words - start, count = left < per_block ? left : per_block;
        const factors *const end = x + count, *const whole = p->is_odd && left <= per_block ? end - 1 : end;
#define ADVANCE(num_words) \
    UNROLLED for (int i = 0; i < num_panels; i++) { panels[i] += (num_words) * LANES; next[i] += (num_words) * LANES; }
        for (; whole - x >= 4; x += 4) {
            UNROLLED for (int row = 0; row < num_rows; row++) {
                x4[row] = load_words(x + row * stride);
                KEEP(x4[row]);
            }
            MULTIPLY_WORD(0, 0, )
            MULTIPLY_WORD(1, 1, )
            MULTIPLY_WORD(2, 2, )
            MULTIPLY_WORD(3, 3, )
            ADVANCE(4)
        }
        for (; x < end; x++) {
            const uint32x4_t mask = vdupq_n_u32(x < whole ? 0xffffffff : 0xffff);
            UNROLLED for (int row = 0; row < num_rows; row++) x4[row] = repeat_word(x + row * stride);
            MULTIPLY_WORD(0, 0, & mask)
            ADVANCE(1)
        }
    }
    EACH_PART vst1q_f32(AT, sums[row][i][part]);
#undef EACH_PART
#undef AT
#undef ADVANCE
}
